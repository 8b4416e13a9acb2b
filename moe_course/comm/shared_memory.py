"""Memory that several processes see: nameless, so nothing stays behind, and as large as it has to be.

Every rank has one such file. It is huge and sparse: only pages that were touched exist, so each purpose gets a range
of its own that never has to move, and a larger message only needs a longer mapping of it.

Source: Linux `memfd_create`; PyTorch symmetric memory hands out descriptors in the same way. Built in: notebook 06.
"""

from __future__ import annotations

import ctypes
import os
import weakref

import torch

REGION = 1 << 40  # bytes of address range for one purpose
GROUP = 1 << 44  # for one group of ranks: sixteen regions, the upper half for windows
FILE = 1 << 62
GROUPS = FILE // GROUP
ALIGN = 64  # every part begins on a cache line
_LEAST = 1 << 16  # bytes; mappings grow in powers of two
_PAGE = os.sysconf("SC_PAGE_SIZE")
_READ_WRITE, _SHARED = 3, 1  # PROT_READ | PROT_WRITE, MAP_SHARED

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def create() -> int:
    """Descriptor of new shared memory, `FILE` bytes, none of them touched. Raises OSError."""
    file = os.memfd_create("moe-course", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, FILE)
    except OSError:
        os.close(file)
        raise
    return file


def map_at(file: int, offset: int, nbytes: int) -> torch.Tensor:
    """`nbytes` of a file as a uint8 tensor, zeros at first. Raises OSError.

    The mapping lives as long as a tensor that looks into it. Python's own `mmap` would hold a descriptor for each.
    """
    address = _libc.mmap(None, nbytes, _READ_WRITE, _SHARED, file, offset)
    if address in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes of shared memory: {os.strerror(code)}")
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # the tensor holds `memory`; not at exit, when tensors may still be in use
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def aligned(nbytes: int, to: int = ALIGN) -> int:
    """The next multiple of `to`."""
    return -(-nbytes // to) * to


def move(to: torch.Tensor, at: int, rows: torch.Tensor, start: int, nbytes: int) -> None:
    """Copy `nbytes` of contiguous uint8 rows, from their byte `start` on, to byte `at` of flat uint8 memory."""
    # torch's `copy_` first reads what it will overwrite: 1.4 ms instead of 0.9 for 4 MB here and 4 MB at a peer
    ctypes.memmove(to.data_ptr() + at, rows.data_ptr() + start, nbytes)


class Memory:
    """The memories of a group, as one of its ranks sees them.

    Args:
        files: descriptor of every member's file, in group order.
        number: of the group; its ranges begin at `number * GROUP` in every file.
    """

    def __init__(self, files: list[int], number: int):
        self._files, self._base = files, number * GROUP
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}
        self._windows = self._base + GROUP // 2  # where the next window begins

    def region(self, member: int, index: int, nbytes: int) -> torch.Tensor:
        """Region `index` (below 8) of a member, uint8 `[nbytes or more]`.

        Everybody maps the same bytes of the same file, so nobody has to say that a region has grown. Tensors that
        look into the shorter mapping keep it, and see the same bytes.
        """
        mapped = self._mapped.get((member, index))
        if mapped is None or mapped.numel() < nbytes:
            length = max(_LEAST, 1 << (nbytes - 1).bit_length())
            mapped = map_at(self._files[member], self._base + index * REGION, length)
            self._mapped[member, index] = mapped
        return mapped

    def window(self, nbytes: int) -> list[torch.Tensor]:
        """New memory on every member, uint8 `[nbytes]`: all ranks ask for the same ones in the same order."""
        offset, length = self._windows, aligned(max(nbytes, 1), _PAGE)
        self._windows += length
        return [map_at(file, offset, length)[:nbytes] for file in self._files]
