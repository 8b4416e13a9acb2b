"""Write a Hugging Face GLM model as a checkpoint with one tensor per expert and projection.

Transformers keeps the experts of a layer fused (`gate_up_proj [E, 2I, H]`); published GLM and DeepSeek
checkpoints, and vLLM's loader, name every expert apart: `…mlp.experts.12.gate_proj.weight [I, H]`. Those
names are what lets a rank read only its own experts. Built in: notebook 05.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

#: Kept in fp32 whatever the checkpoint's dtype: rounding the router moves tokens to other experts.
FP32_SUFFIXES = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
_FUSED = re.compile(r"(?P<prefix>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)$")


def per_expert_tensors(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split fused expert tensors into `experts.<e>.{gate,up,down}_proj.weight`; other tensors pass through."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in state_dict.items():
        fused = _FUSED.match(name)
        if fused is None:
            out[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            stem = f"{fused['prefix']}.{expert}"
            if fused["kind"] == "down_proj":
                out[f"{stem}.down_proj.weight"] = weight
            else:
                gate, up = weight.chunk(2)  # [I, H] each: gate rows first
                out[f"{stem}.gate_proj.weight"], out[f"{stem}.up_proj.weight"] = gate, up
    return out


def save_checkpoint(model: torch.nn.Module, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write `config.json` and `model.safetensors` for a Hugging Face GLM model; returns the weights' path.

    `config.json` also names `scoring_func` and `topk_method`: Hugging Face's class leaves them out, and vLLM
    would then route by softmax without the correction bias (`deepseek_v2.py : DeepseekV2MoE`).
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.float32 if name.endswith(FP32_SUFFIXES) else dtype).contiguous().clone()
        for name, tensor in per_expert_tensors(model.state_dict()).items()
    }
    path = directory / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    config = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "dtype": str(dtype).removeprefix("torch."),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return path
