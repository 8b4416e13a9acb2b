"""Read routed expert ids from whatever an engine left: `[T, L, K]`, rows by layers by routes.

| file | from |
|---|---|
| .npy, .npz | vLLM's `RequestOutput.outputs[0].routed_experts`, int16 or int32; one array for each request |
| .pt, .safetensors | `torch.topk(router_logits, K).indices` of transformers' `output_router_logits` |
| .json | nested lists |
| a folder | `moe-course run --trace DIR` |

Source: vLLM `routed_experts_capturer.py`, vllm-project/vllm#28284. Built in: notebook 11.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_course.cost.routing import MOST_EXPERTS, Routing, checked
from moe_course.errors import ConfigError, MoECourseError

#: Names under which ids are looked for in a file with several arrays.
KNOWN_KEYS = ("routed_experts", "topk_ids", "topk_indices", "ids")
LAYOUTS = ("TLK", "LTK")
_SUFFIXES = (".npy", ".npz", ".pt", ".pth", ".safetensors", ".json")


def read_routing(path: str | Path, *, key: str | None = None, layout: str = "TLK") -> Routing:
    """Read a file or a trace folder.

    Args:
        key: name of the array in a file with several. Without it a known name is taken, else all arrays of ids with
            the same L and K, one behind the other, as of several requests.
        layout: "TLK", or "LTK" for a list of layers; `[T, K]` is one layer.

    Raises:
        ConfigError: a file that cannot be read, or that holds no ids; names file, shape and dtype.
        TraceError: a trace folder that does not add up.
    """
    path = Path(path)
    if path.is_dir():
        return checked(_from_trace(path))
    if not path.exists():
        raise ConfigError(f"{path} does not exist; name a file ({', '.join(_SUFFIXES)}) or a trace folder")
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{path}: {path.suffix or 'no'} is not a known suffix, known: {', '.join(_SUFFIXES)}")
    if layout not in LAYOUTS:
        raise ConfigError(f"--layout is {layout!r}, known values: {', '.join(LAYOUTS)}")
    try:
        content = _READERS[path.suffix](path)
    except MoECourseError:
        raise
    except Exception as error:  # each library has its own
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} cannot be read as {path.suffix}: {type(error).__name__}: {reason}") from None
    try:
        ids, notes = _choose(content, path, key, layout)
    except (TypeError, RuntimeError, NotImplementedError) as error:  # sparse, quantised or without values
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} holds something else than an array of ids: {reason}") from None
    return checked(Routing(str(path), ids, tuple(range(ids.shape[1])), notes=tuple(notes)))


def _npy(path: Path) -> Any:
    return np.load(path, allow_pickle=False)


def _npz(path: Path) -> Any:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{path} is damaged: {error}; save it once more") from None


def _pt(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)  # runs no code of the file


def _safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


_READERS = {
    ".npy": _npy, ".npz": _npz, ".pt": _pt, ".pth": _pt, ".safetensors": _safetensors, ".json": _json
}  # fmt: skip


def _choose(content: Any, path: Path, key: str | None, layout: str) -> tuple[torch.Tensor, list[str]]:
    """The ids of a file's content, and what to say about the choice."""
    if not isinstance(content, dict):
        if key is not None:
            raise ConfigError(f"{path} holds one array without a name; leave --key {key} out")
        return _as_ids(content, str(path), layout), []
    if key is None:
        key = next((name for name in KNOWN_KEYS if name in content), None)
    if key is not None:
        if key not in content:
            raise ConfigError(f"{path} has no {key!r}; --key is one of: {', '.join(content) or '(it is empty)'}")
        return _as_ids(content[key], f"{path}, {key}", layout), []
    found = {}
    for name, value in content.items():
        if _is_ids(value):
            found[name] = _as_ids(value, f"{path}, {name}", layout)
    shapes = {tuple(ids.shape[1:]) for ids in found.values()}
    if len(shapes) != 1:
        listed = ", ".join(f"{name} {_described(value)}" for name, value in list(content.items())[:8])
        raise ConfigError(
            f"{path}: which array holds the ids? --key NAME says it. It has: {listed or 'nothing'}"
            + (f" and {len(content) - 8} more" if len(content) > 8 else "")
        )
    notes = [] if len(found) == 1 else [f"{len(found)} arrays, one behind the other"]
    return torch.cat(list(found.values())), notes


def _is_ids(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim in (2, 3) and value.dtype.kind in "iu"
    if isinstance(value, torch.Tensor):
        return value.ndim in (2, 3) and not value.dtype.is_floating_point and value.dtype != torch.bool
    return isinstance(value, list | tuple)


def _as_ids(value: Any, name: str, layout: str) -> torch.Tensor:
    """`[T, L, K]` int32. Raises ConfigError that names shape and dtype."""
    if isinstance(value, list | tuple):
        value = _stacked(value, name)
    if isinstance(value, torch.Tensor):
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if not isinstance(value, np.ndarray):
        raise ConfigError(f"{name} holds a {type(value).__name__}, expected ids [T, L, K]")
    if value.dtype.kind not in "iu":
        raise ConfigError(
            f"{name} has shape {list(value.shape)} and dtype {value.dtype}: ids are whole numbers. Of router logits "
            "save torch.topk(logits, K).indices; where a bias chooses, save what the router returned"
        )
    if value.ndim == 2:
        value = value[:, None]  # one layer
    elif value.ndim == 3 and layout == "LTK":
        value = value.swapaxes(0, 1)
    if value.ndim != 3:
        raise ConfigError(f"{name} has shape {list(value.shape)} and dtype {value.dtype}, expected [T, L, K] or [T, K]")
    for odd in (int(value.max()), int(value.min())) if value.size else ():
        if not -1 <= odd < MOST_EXPERTS:
            row, layer, k = np.argwhere(value == odd)[0]
            raise ConfigError(
                f"{name}: id {odd} at row {row}, layer {layer}, k {k} (shape {list(value.shape)}, {value.dtype}); ids "
                f"are 0 to {MOST_EXPERTS - 1}, and -1 is no route. Was it saved in a dtype that is too small, or is it "
                "something else than ids?"
            )
    return torch.from_numpy(np.ascontiguousarray(value).astype(np.int32))


def _stacked(value: list | tuple, name: str) -> np.ndarray:
    """A list of tensors, or of lists, as one array."""
    if value and all(isinstance(part, torch.Tensor | np.ndarray) for part in value):
        shapes = {tuple(part.shape) for part in value}
        if len(shapes) > 1:
            raise ConfigError(f"{name} is a list of arrays of shapes {sorted(shapes)[:4]}, expected one shape")
        return np.stack([np.asarray(part) for part in value])
    try:
        return np.array(value)
    except ValueError:
        raise ConfigError(
            f"{name}: lists of {len(value)} entries that are not all as long; each row needs K ids in each of L "
            "layers, -1 where there is no route"
        ) from None


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


def _from_trace(folder: Path) -> Routing:
    """The rows of all ranks by step, rank and row; routes that were not recorded are -1."""
    from moe_course.trace.trace import Trace

    trace = Trace.load(folder)
    if not len(trace):
        raise ConfigError(f"{folder}: a trace without routes; record a run with at least one sparse layer")
    column = {name: trace.columns[name].long() for name in ("step", "layer", "source_rank", "row", "k", "expert")}
    plan, source, notes = trace.meta.get("plan", {}), column["source_rank"], ()
    if shared := plan.get("reduce_group") is not None:  # TP ranks hold the same rows, and each recorded some routes
        source = source // plan["tp"]
        notes = ("rows that TP ranks shared are one row each; which rank they belong to is open",)
    places, row = torch.stack([column["step"], source, column["row"]], dim=1).unique(dim=0, return_inverse=True)
    layers, layer = column["layer"].unique(return_inverse=True)
    ids = torch.full((len(places), len(layers), int(column["k"].max()) + 1), -1, dtype=torch.int32)
    ids[row, layer, column["k"]] = column["expert"].int()
    rank = None if shared else places[:, 1]
    return Routing(str(folder), ids, tuple(layers.tolist()), rank, places[:, 0], notes)
