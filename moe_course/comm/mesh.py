"""What ranks of one host hold of each other: everybody's memory, and a connection that breaks when a rank dies.

Descriptors travel over abstract Unix sockets, which are no files and need no cleaning. The sockets stay open and
silent: the kernel closes them with their process, however it ends, and so its peers learn of it.

Source: `SCM_RIGHTS`; PyTorch symmetric memory's IpcChannel. Built in: notebook 06.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
import weakref

from moe_course.comm import shared_memory
from moe_course.comm.wire import LostPeer

_TOKEN_BYTES = 16
_LONGEST = 1000  # bytes of a last word
_HELLO_S = 0.5  # a rank says who it is at once
_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


class Mesh:
    """This rank's memory and a listener, at first; `connect` adds everybody else's.

    Attributes:
        address: where others find this rank, and the token they have to show.
        files: rank -> descriptor of its memory.
        groups: groups that have been made so far; the next one gets this number.

    Raises OSError where the system has no such memory or sockets.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.groups = rank, size, 0
        self.files = {rank: shared_memory.create()}
        self._peers: dict[int, socket.socket] = {}
        self._ended = weakref.finalize(self, _close, self.files, self._peers)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"moe-course-{secrets.token_hex(8)}"
        self._listener.bind(f"\0{name}")  # abstract: it is in no folder
        self._listener.listen(size)
        self._token = secrets.token_bytes(_TOKEN_BYTES)  # names of sockets are no secret, this is
        self.address = f"{name} {self._token.hex()}"
        _meshes.add(self)

    def connect(self, addresses: list[str], timeout: float) -> None:
        """Exchange descriptors with everybody: the higher rank calls the lower one. Raises LostPeer."""
        deadline = time.monotonic() + timeout
        with self._listener:
            for peer in range(self.rank):
                name, token = addresses[peer].split()
                try:
                    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    self._peers[peer] = connection
                    connection.settimeout(max(0.01, deadline - time.monotonic()))
                    connection.connect(f"\0{name}")
                    hello = bytes.fromhex(token) + self.rank.to_bytes(4, "little")
                    socket.send_fds(connection, [hello], [self.files[self.rank]])
                    self.files[peer] = _receive(connection)[1]
                except (OSError, ValueError) as error:
                    raise LostPeer(peer, isinstance(error, TimeoutError), str(error)) from None
            while len(self._peers) < self.size - 1:
                self._accept(deadline)
        for connection in self._peers.values():
            connection.setblocking(False)  # otherwise a look at a silent one would wait for it

    def _accept(self, deadline: float) -> None:
        absent = min(set(range(self.size)) - self._peers.keys() - {self.rank})
        self._listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            raise LostPeer(absent, isinstance(error, TimeoutError), f"it did not connect: {error}") from None
        connection.settimeout(_HELLO_S)
        try:
            hello, file = _receive(connection)
        except (OSError, ValueError):
            connection.close()  # not one of us
            return
        peer = int.from_bytes(hello[_TOKEN_BYTES:], "little")
        known = secrets.compare_digest(hello[:_TOKEN_BYTES], self._token)
        if not known or not self.rank < peer < self.size or peer in self._peers:
            os.close(file)
            connection.close()
            return
        self._peers[peer], self.files[peer] = connection, file
        try:
            socket.send_fds(connection, [b"welcome"], [self.files[self.rank]])
        except OSError as error:
            raise LostPeer(peer, isinstance(error, TimeoutError), str(error)) from None

    def gone(self, peer: int) -> str | None:
        """What became of a rank, None while it is there. Costs one system call."""
        try:
            said = self._peers[peer].recv(_LONGEST, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError as error:
            return str(error)
        return said.decode(errors="replace") or "its process has ended, or has left the group"

    def leave(self, why: str) -> None:
        """Say a last word to everybody, and be gone for them."""
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.send(why.encode()[:_LONGEST])
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give back connections and descriptors. Memory that is mapped stays until nobody looks into it."""
        self._listener.close()
        self._ended()


def _receive(connection: socket.socket) -> tuple[bytes, int]:
    """One message with one descriptor. Raises OSError, or ValueError when there is none."""
    said, files, _, _ = socket.recv_fds(connection, 64, 1)
    if len(files) != 1:
        raise ValueError("no descriptor came along")
    os.set_inheritable(files[0], False)  # unlike others, descriptors that come this way are
    return said, files[0]


def _close(files: dict[int, int], peers: dict[int, socket.socket]) -> None:
    for connection in peers.values():
        connection.close()
    for file in files.values():
        os.close(file)
    files.clear()
    peers.clear()


def _after_fork() -> None:
    # a child that held the connections would hide its parent's death; it is no rank
    for mesh in list(_meshes):
        mesh.close()


os.register_at_fork(after_in_child=_after_fork)
