"""Which ranks are on which host, so that a broken connection has a name."""

import ipaddress
import platform
import re
import socket
from dataclasses import dataclass

import psutil
import torch.distributed as dist

_MAYBE_ADDRESS = re.compile(r"[0-9A-Fa-f:.]{4,}")


class LostRank(ConnectionError):
    """Another rank's connection broke: its process was killed, or its host is gone. The text names both."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a job.

    Attributes:
        rank: of this process.
        names: of the host of each rank.
        addresses: host's name -> its network addresses.
    """

    rank: int
    names: tuple[str, ...]
    addresses: dict[str, frozenset[str]]

    def lost_by(self, error: BaseException) -> str:
        """The ranks and the host that an error of a collective speaks of by address; empty if it speaks of none.

        gloo and NCCL name the peer's address in such an error. An address that several hosts have, as 127.0.0.1, says
        nothing.
        """
        for address in _MAYBE_ADDRESS.findall(str(error)):
            hosts = [name for name, addresses in self.addresses.items() if _plain(address) in addresses]
            if len(hosts) == 1:
                others = [str(i) for i, name in enumerate(self.names) if name == hosts[0] and i != self.rank]
                return f"{'one of ranks' if len(others) > 1 else 'rank'} {', '.join(others)} on {hosts[0]}"
        return ""


def gather_hosts() -> Hosts:
    """The hosts of all ranks; a collective."""
    own = (platform.node(), _own_addresses())
    of_ranks: list[tuple[str, frozenset[str]]] = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return Hosts(dist.get_rank(), tuple(name for name, _ in of_ranks), dict(of_ranks))


def _own_addresses() -> frozenset[str]:
    families = (socket.AF_INET, socket.AF_INET6)
    found = [one for of_link in psutil.net_if_addrs().values() for one in of_link if one.family in families]
    return frozenset(_plain(one.address) for one in found)


def _plain(address: str) -> str:
    """An address in its one spelling, without a link's name; what is no address stays as it is."""
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(getattr(known, "ipv4_mapped", None) or known)
