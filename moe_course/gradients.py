"""Inference only: an exchange moves bytes, and bytes carry no gradient.

Without this, `backward()` after a layer would succeed with a part of the gradient: that of the router and of the
shared expert, which meet no exchange. Built in: notebook 06.
"""

from __future__ import annotations

import torch

from moe_course.errors import ConfigError

_TRAVELS = (
    "rows travel without their gradient: this package is inference only; wrap the call in torch.inference_mode(), "
    "inside each rank's function, since the mode belongs to the thread"
)


def no_gradient(where: str, why: str = _TRAVELS, **tensors: torch.Tensor | None) -> None:
    """Refuse tensors whose gradient would be lost.

    Args:
        where: begins the message, "rank 0, layer 3".
        why: where a gradient is lost, and the cure; ends the message.
        tensors: by the names in the message; None is passed over.

    Raises ConfigError when gradient mode is on and one of them requires grad.
    """
    if not torch.is_grad_enabled():
        return
    asking = [name for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad]
    if asking:
        raise ConfigError(f"{where}: requires_grad is True for {', '.join(asking)} and gradient mode is on, but {why}")
