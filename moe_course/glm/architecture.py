"""Which models the shell can be, and their classes in transformers."""

from __future__ import annotations

import gc
import threading

#: Read, built and checked; the first is GLM-5.1's.
ARCHITECTURES = ("GlmMoeDsaForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
_IMPORTING = threading.Lock()  # ranks that are threads take turns


def model_class(architecture: str) -> type:
    """The class of that name; transformers reads the module of a model at first use.

    The import makes some 180,000 objects and hardly any garbage. Python's collector would look through all of them,
    again and again: without it the import takes about a quarter less time.
    """
    with _IMPORTING:
        collecting = gc.isenabled()
        gc.disable()
        try:
            import transformers

            return getattr(transformers, architecture)
        finally:
            if collecting:
                gc.enable()
