"""The model around the sparse layers: shell, checkpoint, generation. transformers is imported on first use."""

from moe_course.glm.generate import generate
from moe_course.glm.model import load

__all__ = ["generate", "load"]
