"""The watch of the ranks over each other: a job ends at once when a rank is gone, and reports the rank and its host.

gloo names a lost peer only by its address, NCCL ends the process without a name, and neither notices an unplugged cable
for minutes. So every rank keeps a connection to rank 0 that stays silent until the rank leaves. The kernel closes the
connection when the process ends, and its keepalive probes detect a host that is gone or out of reach. A process that is
only stopped is not lost, because its kernel still answers the probes.
"""

import contextlib
import json
import logging
import os
import platform
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil
import torch.distributed as dist

from dataset_builders.errors import one_line
from trainer.contract.names import EXIT_FAILED

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a host out of reach is lost after 20 s
CONNECT_SECONDS = 5.0  # for one address
JOIN_SECONDS = 60.0  # for all ranks
GATHER_SECONDS = 0.5  # for the other ranks of a lost host, whose connections close one after the other
CAUSE_SECONDS = 2.0  # between a collective's error and the closed connection of the rank that caused it
FAILED_SECONDS = 10.0  # for the failed rank to report why, before this one ends and torchrun stops all other ranks
_TOKEN_BYTES = 16
_LOST = "lost "  # begins the line about ranks that left without a word
log = logging.getLogger("athanor.trainer")


@dataclass(frozen=True, slots=True)
class RankAddress:
    """The location of a rank: the name and addresses of its host; for rank 0 also the port and token of its watch."""

    host: str
    addresses: tuple[str, ...]
    port: int = 0
    token: bytes = b""

    def text(self) -> str:
        """Return this location as text, for exchange between processes."""
        return json.dumps([self.host, self.addresses, self.port, self.token.hex()])

    @classmethod
    def of_text(cls, text: str) -> "RankAddress":
        host, addresses, port, token = json.loads(text)
        return cls(host, tuple(addresses), port, bytes.fromhex(token))


class Watch:
    """The connections of this rank: from rank 0 to every rank, from any other rank to rank 0.

    Args:
        end: called once, in a thread, with a line that tells which ranks are gone, or which rank failed and why; and
            with whether the ranks are lost, that is, gone without a message.
    """

    def __init__(
        self, peers: Mapping[int, socket.socket], hosts: Sequence[str], end: Callable[[str, bool], None]
    ) -> None:
        self._peers, self._hosts, self._end = dict(peers), hosts, end
        self._has_cause, self._leaving = threading.Event(), False
        self._selector = selectors.DefaultSelector()
        for rank, connection in self._peers.items():
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            self._selector.register(connection, selectors.EVENT_READ, rank)
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def leave(self, why: str = "") -> None:
        """Tell the peers that this rank leaves: its work is done, or it failed for the given reason."""
        self._leaving = True
        self._tell(why)

    def wait_for_cause(self) -> None:
        """Wait after a failed collective; if it failed because a rank is gone, this process ends here."""
        if self._has_cause.wait(CAUSE_SECONDS):
            time.sleep(2 * FAILED_SECONDS)  # `end` ends this process meanwhile, in the watch's thread

    def _listen(self) -> None:
        while self._peers and not self._leaving:
            lost = self._read_peers()
            if lost and not self._leaving:
                self._has_cause.set()
                # A host that goes takes several ranks with it, and one line names them all.
                deadline = time.monotonic() + GATHER_SECONDS
                while self._peers and (seconds := deadline - time.monotonic()) > 0:
                    lost += self._read_peers(seconds)
                self._finish(f"{_LOST}{name_ranks(lost, self._hosts)}")

    def _read_peers(self, seconds: float | None = None) -> list[int]:
        """Wait until some peers have sent or closed, or for some seconds; return the ranks that are lost."""
        ranks = [self._read_peer(key) for key, _ in self._selector.select(seconds)]
        return [rank for rank in ranks if rank is not None]

    def _read_peer(self, key: selectors.SelectorKey) -> int | None:
        """Read a peer's message and return its rank if it is lost. An empty line, its goodbye, only ends the watch over
        it; the reason of another rank's failure ends this process."""
        try:
            message = key.fileobj.recv(65536).decode(errors="replace")
        except OSError:  # no answer to the probes, or a reset
            message = ""
        self._selector.unregister(key.fileobj)
        del self._peers[key.data]
        if message.strip() and not self._leaving:
            self._has_cause.set()
            self._finish(message.strip())
        return None if message else key.data

    def _finish(self, line: str) -> None:
        self._tell(line)
        self._end(line, line.startswith(_LOST))

    def _tell(self, line: str) -> None:
        for connection in list(self._peers.values()):
            with contextlib.suppress(OSError):
                connection.sendall(f"{line}\n".encode())


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Format ranks with their hosts for a person: "ranks 2, 3 on node-b"."""
    of_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        of_host.setdefault(hosts[rank], []).append(rank)
    return " and ".join(
        f"rank{'s' * (len(there) > 1)} {', '.join(map(str, there))} on {host}" for host, there in of_host.items()
    )


@contextlib.contextmanager
def watched(
    rank: int,
    world: int,
    on_lost: Callable[[str], None],
    gather: Callable[[RankAddress], list[RankAddress]] | None = None,
) -> Iterator[None]:
    """Let the ranks watch each other while the context is open; a collective at the start.

    Args:
        gather: returns every rank's location, by rank; None: gather by the process group, which then has all ranks.
        on_lost: called in a thread with a line that names the lost ranks and their hosts; then this process ends with
            status 1. If another rank failed and reports why itself, this process ends without the call.
    """
    if world == 1:
        yield
        return

    def end(line: str, is_lost: bool) -> None:
        try:
            if is_lost:
                on_lost(line)
            else:
                print(line, file=sys.stderr, flush=True)
                time.sleep(FAILED_SECONDS)
        finally:  # even if nothing can be written, because the main thread waits for a rank that is gone
            os._exit(EXIT_FAILED)  # this is a thread: `sys.exit` would end only the thread

    def gather_by_process_group(own: RankAddress) -> list[RankAddress]:
        everybody = [own] * world
        dist.all_gather_object(everybody, own)
        return everybody

    watch = _join(rank, world, end, gather or gather_by_process_group)
    try:
        yield
    except BaseException as error:
        # A failed collective is a RuntimeError. Where another rank has made it fail, gloo's or NCCL's message is not
        # the reason to report.
        if isinstance(error, RuntimeError):
            watch.wait_for_cause()
        watch.leave(f"rank {rank} on {platform.node()} failed: {type(error).__name__}: {one_line(error)}")
        raise
    watch.leave()


def _join(
    rank: int, world: int, end: Callable[[str, bool], None], gather: Callable[[RankAddress], list[RankAddress]]
) -> Watch:
    """Return the watch of this rank; if rank 0 cannot be reached, a watch without peers, with a warning."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=world) if rank == 0 else None
    own = RankAddress(platform.node(), _own_addresses())
    if server:
        own = RankAddress(own.host, own.addresses, server.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))
    everybody = gather(own)
    hosts, first = [place.host for place in everybody], everybody[0]
    if server:
        with server:
            return Watch(_accept(server, first.token, world), hosts, end)
    connection = _connect(rank, first, first.host == own.host)
    if connection is None:
        reason = "the ranks cannot watch each other: gloo or NCCL will see late that one is gone"
        log.warning("rank %d on %s cannot reach port %d of %s; %s", rank, own.host, first.port, first.host, reason)
    return Watch({} if connection is None else {0: connection}, hosts, end)


def _accept(server: socket.socket, token: bytes, world: int) -> dict[int, socket.socket]:
    ranks: dict[int, socket.socket] = {}
    deadline = time.monotonic() + JOIN_SECONDS
    while len(ranks) < world - 1 and (seconds := deadline - time.monotonic()) > 0:
        server.settimeout(seconds)
        with contextlib.suppress(OSError):  # a connection that sends nothing, or the deadline
            connection = server.accept()[0]
            connection.settimeout(CONNECT_SECONDS)
            greeting = connection.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
            if secrets.compare_digest(greeting[:_TOKEN_BYTES], token):
                connection.sendall(token)
                ranks[int.from_bytes(greeting[_TOKEN_BYTES:])] = connection
            else:
                connection.close()
    return ranks


def _connect(rank: int, first: RankAddress, is_here: bool) -> socket.socket | None:
    """Connect to rank 0's watch by the first of its names and addresses that works; None if none does."""
    addresses = ["127.0.0.1"] if is_here else [first.host, os.environ.get("MASTER_ADDR", ""), *first.addresses]
    for address in filter(None, addresses):
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, first.port), CONNECT_SECONDS)
            connection.sendall(first.token + rank.to_bytes(4))
            if connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL) == first.token:
                return connection
            connection.close()
    return None


def _own_addresses() -> tuple[str, ...]:
    """Return the addresses of this host that another host may reach."""
    entries = [entry for of_link in psutil.net_if_addrs().values() for entry in of_link]
    inet = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
    return tuple(address for address in inet if not address.startswith(("127.", "::1", "fe80")))
