"""The control block of a rank: semaphores that others post, and the headers it shows them. Built in: notebook 06."""

from __future__ import annotations

import numpy as np
import torch

from moe_course.comm import semaphores
from moe_course.comm.header import FIELDS
from moe_course.comm.shared_memory import Memory, aligned

CONTROL = 0  # the region it lies in
HEADER, DATA, WINDOW = range(3)  # what a semaphore says about its source: its header, its rows, its puts are there


def control_blocks(memory: Memory, size: int, rank: int) -> tuple[list[list[int]], list[list[int]], list[np.ndarray]]:
    """This rank's view of all control blocks of a group; its own semaphores are made here, with value 0.

    A block holds a semaphore for each purpose and source, then both halves of its rank's own header.

    Returns:
        `(post_to, wait_for, headers)`: the address of the semaphore that tells a peer, and of the one that a peer
        tells this rank with, `[purpose][peer]`; the headers of every member, int64 `[2, fields]` each.
    """
    fields, first = aligned(8 * (len(FIELDS) + 1 + 2 * size)), aligned(3 * size * semaphores.STRIDE)
    blocks = [memory.region(member, CONTROL, first + 2 * fields) for member in range(size)]

    def place(block: torch.Tensor, purpose: int, source: int) -> int:
        return block.data_ptr() + (purpose * size + source) * semaphores.STRIDE

    post_to = [[place(block, purpose, rank) for block in blocks] for purpose in (HEADER, DATA, WINDOW)]
    wait_for = [[place(blocks[rank], purpose, source) for source in range(size)] for purpose in (HEADER, DATA, WINDOW)]
    for addresses in wait_for:
        for address in addresses:
            semaphores.init(address)
    headers = [block[first : first + 2 * fields].view(torch.int64).view(2, -1).numpy() for block in blocks]
    return post_to, wait_for, headers
