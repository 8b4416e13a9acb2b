"""Check that `meta.json` holds what a reader will look up in it. Built in: notebook 13."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from moe_course.backends.capabilities import SHAPES, shape_of
from moe_course.backends.support import TRANSPORTS
from moe_course.errors import TraceError
from moe_course.quant import FORMATS
from moe_course.trace.schema import ALLOWED, LEAST, META, MOST, NESTED, SCHEMA
from moe_course.trace.strict.plan import check_plan

_TABLES = {"shape": tuple(SHAPES), "transport": TRANSPORTS, "dispatch_quant": ("none", *FORMATS)}


def check_meta(meta: object, folder: Path) -> dict:
    """`meta.json`, if it is one of this version. Raises TraceError naming the field, its value and what is expected."""
    file = folder / "meta.json"
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        found = meta.get("schema") if isinstance(meta, dict) else meta
        raise TraceError(f"{file}: schema is {found!r}, this version reads {SCHEMA!r}")
    for name in sorted(set(META) ^ set(meta)):
        what = "is missing" if name in META else "is not known"
        raise TraceError(f"{file}: field {name} {what}; this version has {len(META)}: {', '.join(META)}")
    for name, kind in META.items():
        _check_kind(file, name, meta[name], kind)
    for name, inner in NESTED.items():
        for key, kind in inner.items():
            if key not in meta[name]:
                raise TraceError(f"{file}: field {name} has no {key}; it has {', '.join(meta[name])}")
            _check_kind(file, f"{name}.{key}", meta[name][key], kind)
    for name, allowed in (ALLOWED | _TABLES).items():
        value = _look_up(meta, name)
        if value not in allowed:
            _refuse(file, name, value, " or ".join("null" if one is None else one for one in allowed))
    for name, least in LEAST.items():
        value, most = _look_up(meta, name), MOST.get(name)
        if value < least or (most is not None and value > most):
            _refuse(file, name, value, f"{least} or more" if most is None else f"{least} to {most}")
    if (runs := shape_of(meta["backend"])) != meta["shape"]:
        known = f"it runs as {runs!r}" if runs in SHAPES else "no backend has that name"
        raise TraceError(f"{file}: field backend is {meta['backend']!r} and shape is {meta['shape']!r}: {known}")
    if meta["reduce_in_node"] and meta["shape"] != "two_hop":
        raise TraceError(f"{file}: field reduce_in_node is True and shape is {meta['shape']!r}, expected 'two_hop'")
    _check_texts(file, meta)
    _check_lists(file, meta)
    check_plan(file, meta)
    return meta


def _check_kind(file: Path, name: str, value: object, kind: type | tuple) -> None:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        _refuse(file, name, value, " or ".join("null" if k is type(None) else k.__name__ for k in kinds))


def _refuse(file: Path, name: str, value: object, expected: str) -> NoReturn:
    raise TraceError(f"{file}: field {name} is {value!r}, expected {expected}")


def _look_up(meta: dict, name: str) -> Any:
    outer, _, inner = name.partition(".")
    return meta[outer][inner] if inner else meta[outer]


def _ids(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**31 for one in value)


def _check_texts(file: Path, meta: dict) -> None:
    for index, prompt in enumerate(meta["prompts"]):
        known = isinstance(prompt, dict) and isinstance(prompt.get("prompt"), str) and _ids(prompt.get("tokens"))
        if not known:
            raise TraceError(f"{file}: prompt {index} is {prompt!r}, expected its text and its tokens, a list of ids")
    for index, new in enumerate(meta["new_tokens"]):
        if not _ids(new):
            _refuse(file, f"new_tokens[{index}]", new, "a list of token ids")
    for token, text in meta["token_text"].items():
        if not isinstance(text, str) or not token.isdecimal():
            _refuse(file, f"token_text[{token!r}]", text, "the text of a token, under its id")
    occurring = {token for prompt in meta["prompts"] for token in prompt["tokens"]}.union(*meta["new_tokens"])
    for token in sorted(occurring - set(map(int, meta["token_text"]))):
        raise TraceError(f"{file}: field token_text has no text for token {token}, which prompts or new_tokens hold")


def _check_lists(file: Path, meta: dict) -> None:
    """Lists that tell of the same ranks, or of the same prompts, are of one length."""
    for name in ("routes", "plan.experts_per_rank", "plan.nodes"):
        if not _ids(_look_up(meta, name)):
            each = "host" if name == "plan.nodes" else "rank"
            _refuse(file, name, _look_up(meta, name), f"a list with a number for each {each}")
    lengths = {"world_size": meta["world_size"], "plan.world_size": meta["plan"]["world_size"]}
    lengths["routes"] = len(meta["routes"])
    if len(set(lengths.values())) > 1:
        raise TraceError(f"{file}: the number of ranks differs: {lengths}")
    if len(meta["prompts"]) != len(meta["new_tokens"]):
        raise TraceError(f"{file}: {len(meta['prompts'])} prompts, and new_tokens of {len(meta['new_tokens'])}")
