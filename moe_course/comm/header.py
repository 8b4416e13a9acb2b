"""The message before every exchange, and what is wrong when two of them disagree. Built in: notebook 06."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_course.errors import ConfigError, ExchangeMismatch

OPS = (
    "all_gather_rows",
    "reduce_scatter_rows",
    "all_to_all_rows",
    "all_reduce",
    "barrier",
    "split",
    "all_to_all_padded",
    "window",
    "put_rows",
)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
#: Fields every rank must agree on, in the order in which they are compared.
FIELDS = ("op number", "op", "layer", "step", "dtype", "width", "metadata bytes", "metadata dtypes", "window")
UNKNOWN = -1  # "no rows expected" in a message
_COUNTED = ("reduce_scatter_rows", "all_to_all_rows")  # their counts must add up to the rows
_FEW = 16  # ranks


def compare(messages: torch.Tensor, names: Sequence[int], op: str, same_counts: bool) -> None:
    """Raise ExchangeMismatch if any two of the messages `[R, 10 + 2R]` disagree; the same one wherever it is called.

    Args:
        names: world ranks of the members, for the text.
        same_counts: must all ranks state the same counts?
    """
    size, fields = len(names), len(FIELDS)
    if size <= _FEW and _all_fine(messages.tolist(), op, same_counts):
        return
    seen = messages.numpy()  # a dozen small comparisons: numpy's cost a tenth of torch's
    header, rows = seen[:, :fields], seen[:, fields]
    counts, wanted = seen[:, fields + 1 : fields + 1 + size], seen[:, fields + 1 + size :]
    compare_fields(header, names, FIELDS)
    if op in _COUNTED and (counts.sum(axis=1) != rows).any():
        rank = int((counts.sum(axis=1) != rows).argmax())
        announced = counts[rank].tolist()
        said = f"announces {sum(announced)} in its counts {announced}"
        detail = f"rank {names[rank]} has {int(rows[rank])} rows and {said}"
        _mismatch(header[0], "rows", detail)
    if same_counts and (counts != counts[0]).any():
        rank = int((counts != counts[0]).any(axis=1).argmax())
        what = "group numbers" if op == "split" else "counts"
        ours, theirs = counts[0].tolist(), counts[rank].tolist()
        detail = f"rank {names[0]} has {what} {ours}, rank {names[rank]} has {what} {theirs}"
        _mismatch(header[0], "groups" if op == "split" else "rows", detail)
    wrong = (wanted != UNKNOWN) & (wanted != counts.T)
    if wrong.any():
        rank, source = (int(index) for index in divmod(int(wrong.argmax()), size))
        sent, expected = int(counts[source, rank]), int(wanted[rank, source])
        detail = f"rank {names[source]} sends {sent} rows to rank {names[rank]}, which expects {expected}"
        _mismatch(header[0], "rows", detail)


def compare_fields(header, names: Sequence[int], fields: Sequence[str]) -> None:
    """Raise ExchangeMismatch for the first field `[R, fields]` (numpy) that is not the same on all ranks."""
    if (header != header[0]).any():
        column = int((header != header[0]).any(axis=0).argmax())
        peer, field = int((header[:, column] != header[0, column]).argmax()), fields[column]
        values = [_readable(field, int(header[rank, column])) for rank in (0, peer)]
        _mismatch(header[0], field, f"rank {names[0]} has {values[0]}, rank {names[peer]} has {values[1]}")


def _mismatch(header, field: str, detail: str) -> None:
    number, op, layer, step = header[:4].tolist()
    raise ExchangeMismatch(
        f"{OPS[op]} #{number} (layer {layer}, step {step}): {field} differ: {detail}; "
        "every rank must make the same calls in the same order with the same shapes"
    )


def _all_fine(messages: list[list[int]], op: str, same_counts: bool) -> bool:
    """For a few ranks: does nothing differ? Lists are quickest then; what differs, and how, is for the slow way."""
    fields, size = len(FIELDS), len(messages)
    header, first = messages[0][:fields], messages[0][fields + 1 : fields + 1 + size]
    for message in messages:
        counts = message[fields + 1 : fields + 1 + size]
        if message[:fields] != header or (same_counts and counts != first):
            return False
        if op in _COUNTED and sum(counts) != message[fields]:
            return False
        if any(wanted != UNKNOWN for wanted in message[fields + 1 + size :]):
            return False  # or perhaps: somebody knows what to expect, and it has to be compared
    return True


def _readable(field: str, value: int) -> str:
    if field == "op":
        return OPS[value] if 0 <= value < len(OPS) else str(value)
    if field == "dtype":
        return _name(DTYPES[value])
    if field == "metadata dtypes":  # one hexadecimal digit each, 0 for none
        return ", ".join(_name(DTYPES[int(digit, 16) - 1]) for digit in reversed(f"{value:x}")) if value else "none"
    return str(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_code(tensor: torch.Tensor, rank: int) -> int:
    """Number of a tensor's dtype in a message. Raises ConfigError for one that cannot travel."""
    if tensor.dtype not in DTYPES:
        known = ", ".join(_name(dtype) for dtype in DTYPES)
        raise ConfigError(f"rank {rank}: {_name(tensor.dtype)} rows cannot travel, these can: {known}")
    return DTYPES.index(tensor.dtype)
