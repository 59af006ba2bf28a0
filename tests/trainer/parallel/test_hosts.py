"""An error of gloo or NCCL names a peer by its address; people know hosts by their names."""

import pytest

from trainer.parallel.hosts import Hosts

HOSTS = Hosts(
    rank=1,
    names=("a", "a", "b", "b"),
    addresses={
        "a": frozenset({"10.0.0.1", "172.17.0.1", "fe80::1", "127.0.0.1"}),
        "b": frozenset({"10.0.0.11", "172.17.0.1", "fe80::2", "127.0.0.1"}),
    },
)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        ("pair.cc:537] Connection closed by peer [10.0.0.11]:29876", "one of ranks 2, 3 on b"),
        ("pair.cc:553] Read error [::ffff:10.0.0.11]:2212: Connection reset by peer", "one of ranks 2, 3 on b"),
        ("socketProgress: Connection closed by remote peer b<44347>", ""),
        ("recv from 10.0.0.11<44347> failed", "one of ranks 2, 3 on b"),
        ("Read error [fe80::2%eth0]:2212", "one of ranks 2, 3 on b"),
        ("Connection closed by peer [10.0.0.1]:29876", "rank 0 on a"),
        ("no address here: 12:30:45, version 1.2.3", ""),
        ("an address of both: 127.0.0.1 or 172.17.0.1", ""),
        ("an address of neither: 10.0.0.111", ""),
    ],
)
def test_the_host_of_an_address_is_named(error, lost):
    assert HOSTS.lost_by(RuntimeError(error)) == lost
