"""The wire for headers: one TCP connection between every two ranks of a group, read by the rank itself.

A header is a few hundred bytes, and nothing moves before all headers are there, so what counts is how fast a small
message wakes its reader. gloo hands each to a thread of its own, which then wakes the caller; a plain socket wakes
the caller. `moe-course bench headers` puts both side by side.

Built in: notebook 06.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Sequence

_TOKEN_BYTES = 16
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_HELLO_S = 0.5  # a rank says who it is at once


class LostPeer(Exception):
    """The connection to a peer is gone, or it did not answer in time."""

    def __init__(self, peer: int, late: bool, detail: str):
        super().__init__(detail)
        self.peer, self.late = peer, late


class Wire:
    """Connections of one rank to all others of its group.

    Args:
        store: a torch.distributed store that all ranks see.
        name: the same on all ranks of the group, and of no other group.
        timeout: seconds to wait for a peer, when connecting and in an exchange.

    Raises LostPeer for a peer that does not come, or has gone.
    """

    def __init__(self, store, name: str, rank: int, size: int, timeout: float):
        self.rank, self.size, self.timeout = rank, size, timeout
        self._peers: dict[int, socket.socket] = {}
        if size > 1:
            self._connect(store, f"wire/{name}")

    def exchange(self, message: memoryview, into: Sequence[memoryview | None], on_wait=lambda peer: None) -> None:
        """Give every peer `message` and read theirs into `into[peer]`; all have the same number of bytes.

        Args:
            on_wait: called with each peer before it is waited for.
        """
        gone: LostPeer | None = None
        for peer, connection in self._peers.items():
            try:
                connection.settimeout(self.timeout)
                connection.sendall(message)
            except OSError as error:  # the others get theirs first, then this is said
                gone = gone or LostPeer(peer, isinstance(error, TimeoutError), str(error))
        if gone is not None:
            raise gone
        deadline = time.monotonic() + self.timeout
        for peer, connection in self._peers.items():
            on_wait(peer)
            connection.settimeout(_left(deadline))  # one limit for all peers together
            self._read(peer, connection, into[peer])

    def close(self) -> None:
        for connection in self._peers.values():
            connection.close()
        self._peers = {}

    def _read(self, peer: int, connection: socket.socket, into: memoryview) -> None:
        done = 0
        while done < len(into):
            try:
                n = connection.recv_into(into[done:])
            except TimeoutError:
                raise LostPeer(peer, True, f"no answer for {self.timeout:g} s") from None
            except OSError as error:
                raise LostPeer(peer, False, str(error)) from None
            if n == 0:
                raise LostPeer(peer, False, "the connection was closed")
            done += n

    def _connect(self, store, prefix: str) -> None:
        """Every rank listens; the higher of two calls the lower one, shows the group's token, and says who it is."""
        if self.rank == 0:
            store.set(f"{prefix}/token", secrets.token_hex(_TOKEN_BYTES // 2))
        deadline = time.monotonic() + self.timeout
        try:
            address = own_address()
        except OSError as error:
            raise LostPeer(0 if self.rank else 1, False, f"this host does not find MASTER_ADDR: {error}") from None
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind(("", 0))
            listener.listen(self.size)
            store.set(f"{prefix}/{self.rank}", f"{address} {listener.getsockname()[1]}")
            token = store.get(f"{prefix}/token")
            for peer in range(self.rank):
                host, port = store.get(f"{prefix}/{peer}").decode().split()
                try:
                    connection = socket.create_connection((host, int(port)), timeout=_left(deadline))
                    connection.sendall(token + self.rank.to_bytes(4, "little"))
                except OSError as error:
                    late = isinstance(error, TimeoutError)
                    raise LostPeer(peer, late, f"cannot reach {host}:{port}: {error}") from None
                self._keep(peer, connection)
            while len(self._peers) < self.size - 1:
                absent = min(set(range(self.size)) - self._peers.keys() - {self.rank})
                listener.settimeout(_left(deadline))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    raise LostPeer(absent, True, "it did not connect") from None
                hello = _hello(connection)
                if hello[:_TOKEN_BYTES] != token or len(hello) != _TOKEN_BYTES + 4:
                    connection.close()  # not one of us
                    continue
                self._keep(int.from_bytes(hello[_TOKEN_BYTES:], "little"), connection)

    def _keep(self, peer: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(self.timeout)
        self._peers[peer] = connection


def own_address() -> str:
    """The address of this host: that of GLOO_SOCKET_IFNAME, or the one on the way to MASTER_ADDR."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named and (address := interface_address(named)):
        return address
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    found = socket.getaddrinfo(master, int(os.environ.get("MASTER_PORT", "1")), type=socket.SOCK_DGRAM)
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # nothing is sent: the kernel looks up the way
        return probe.getsockname()[0]


def interface_address(name: str) -> str | None:
    """IPv4 address of a network interface; None where it has none, or where the system does not tell (Linux does)."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(found[20:24])


def _hello(connection: socket.socket) -> bytes:
    """What somebody who called says first; nothing, if it takes too long."""
    connection.settimeout(_HELLO_S)
    try:
        return connection.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
    except OSError:
        return b""


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())
