"""The text the tiny model learns from: the Python standard library's own source files.

The files are those of the Python that runs the training, so nothing is downloaded. Modules named in
`HELD_OUT` are never trained on; they measure the loss on unseen text. Licence of the text: PSF-2.0.
Built in: notebook 13.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

SEPARATOR = b"\0"  # bos = eos = 0: stands between modules, and in front of every prompt

#: Modules kept out of training, in the order in which they are joined for evaluation.
HELD_OUT = (
    "argparse.py",
    "bisect.py",
    "calendar.py",
    "csv.py",
    "dataclasses.py",
    "fractions.py",
    "heapq.py",
    "json/decoder.py",
    "queue.py",
    "shutil.py",
    "statistics.py",
    "textwrap.py",
    "threading.py",
)

#: Folders left out: tests quote the held-out modules, the others are tables of data rather than code.
SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})


def stdlib_root() -> Path:
    """The folder that holds the standard library of this Python."""
    return Path(sysconfig.get_path("stdlib"))


def training_files(root: Path | None = None) -> list[Path]:
    """The `.py` files to train on, sorted, without held-out modules and `SKIPPED_FOLDERS`."""
    root = root or stdlib_root()
    held_out = set(HELD_OUT)
    files = (path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    return sorted(path for path in files if path.relative_to(root).as_posix() not in held_out)


def training_bytes(root: Path | None = None) -> torch.Tensor:
    """All training text as one `[n]` uint8 tensor, a NUL in front of every module."""
    parts = [SEPARATOR + path.read_bytes().replace(SEPARATOR, b"") for path in training_files(root)]
    return _to_tensor(b"".join(parts))


def held_out_bytes(root: Path | None = None) -> torch.Tensor:
    """The held-out modules joined in the order of `HELD_OUT`, as one `[n]` uint8 tensor."""
    root = root or stdlib_root()
    return _to_tensor(b"".join((root / name).read_bytes() for name in HELD_OUT))


def windows(text: torch.Tensor, length: int) -> torch.Tensor:
    """Non-overlapping windows `[n // length, length]` of a `[n]` uint8 tensor, as int64; a short tail is dropped."""
    return text[: len(text) // length * length].view(-1, length).long()


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
