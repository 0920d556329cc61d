"""What the ranks of the network tests do."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

from zeepo.sharding import network as network_module
from zeepo.sharding.network import Network
from zeepo.sharding.requests import Loan, PeerFuture, Reply, Wanted

KINDS = {0: "params"}


def make(near: bool = True) -> tuple[Network, dict[int, tuple[int, bytearray]]]:
    """A network that serves what is in the returned table: key -> version and bytes."""
    lock = threading.RLock()
    network = Network(dist.new_group(backend="gloo"), lock, 20.0, KINDS)
    table: dict[int, tuple[int, bytearray]] = {}

    def provide(wanted: Wanted, reply: Reply) -> bool:
        with lock:
            version, data = table.get(wanted.key, (-1, bytearray()))
            if version < wanted.version:
                return False
        view = memoryview(data)[wanted.low : wanted.high]
        reply(Loan([(0, view[:2]), (2, view[2:])], lambda: None))
        return True

    network.provider = provide
    network.look_again()
    if near:
        network.meet(0)
    return network, table


def pull(network: Network, peer: int, wanted: Wanted) -> PeerFuture:
    target = bytearray(wanted.high - wanted.low)
    future = PeerFuture(network, f"key {wanted.key}", 1)
    network.pull(peer, wanted, memoryview(target), future)
    future.target = target  # type: ignore[attr-defined]
    return future


def exchange(near: bool) -> dict[str, Any]:
    """Everybody asks everybody, also for what is not there yet."""
    network, table = make(near)
    me = network.rank
    table[0] = (1, bytearray([me + 1] * 1_000_003))
    network.look_again()
    early = {peer: pull(network, peer, Wanted(0, 7, 3, 5, 9)) for peer in network.peers}
    now = {peer: pull(network, peer, Wanted(0, 0, 1, 3, 1_000_003)) for peer in network.peers}
    is_right = all(
        f.result() is None and f.target == bytearray([p + 1] * 1_000_000) for p, f in now.items()
    )
    were_early = [not f.done() for f in early.values()]
    told = network.collect(1, 0, f"I am {me}".encode(), "the test")
    table[7] = (3, bytearray(range(100, 120)))
    network.look_again()
    expected = bytearray([105, 106, 107, 108])
    late = [f.result() is None and f.target == expected for f in early.values()]
    network.collect(1, 1, b"", "the end")
    answer = {
        "is_right": is_right,
        "were_early": all(were_early),
        "late": all(late),
        "told": told,
        "near": len(network.asking.near),
        "sent": network.counters.bytes_sent,
        "posted": network.bytes_posted,
    }
    answer["closed"] = network.close()
    return answer


__all__ = ["exchange", "make", "network_module"]
