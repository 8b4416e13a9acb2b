"""Record where every token went, and read it again."""

from moe_course.trace.trace import Trace

__all__ = ["Trace"]
