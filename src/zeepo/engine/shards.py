"""Chunks whose bytes are split over the ranks: who owns what, what is offered, how wholes come.

For every PARAM chunk the ranks agree on ranges ([sharding/ranges]). What a rank owns of a kind that
is split is a chunk of its own, a *shard*, which moves between RAM and disk like any other. The
whole is a chunk whose lower tier is all ranks' shards: fetching it gathers, evicting it lets go.

[Note: offers]
Others may ask for what is offered: a chunk of ours, under its label, at a version. A request for a
version that is not there yet waits; nobody asks for an older one, because no rank changes anything
before all have come to the same step. Answering takes the store's lock for a moment, and room for
one chunk that is on disk (`staging`), never the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import xxhash

from zeepo.chunks.store import Chunk, ChunkStore, Kind
from zeepo.chunks.wholes import copy_into, copy_resident
from zeepo.errors import InternalError
from zeepo.memory.tier import Describe, Extent
from zeepo.sharding.network import Network
from zeepo.sharding.ranges import Range
from zeepo.sharding.requests import Loan, PeerFuture, Reply, Wanted

KINDS = {kind: number for number, kind in enumerate(Kind)}
KIND_NAMES = {number: kind.value for kind, number in KINDS.items()}
Pieces = list[tuple[int, memoryview]]


def key_of(label: str) -> int:
    """The same number for the same label on every rank."""
    return int.from_bytes(xxhash.xxh3_64_digest(label.encode()), "little", signed=True)


@dataclass(frozen=True)
class Offered:
    """What a rank can be asked for: a chunk by its label, at a version."""

    kind: Kind
    label: str
    version: int

    def ask(
        self, network: Network, peer: int, part: Range, target: memoryview, future: PeerFuture
    ) -> None:
        """Ask for a range of it, as one part of `future`."""
        wanted = Wanted(KINDS[self.kind], key_of(self.label), self.version, part.low, part.high)
        network.pull(peer, wanted, target, future)

    def get(self, network: Network, peer: int, part: Range, target: memoryview, what: str) -> None:
        """Ask for a range of it and wait."""
        future = PeerFuture(network, what, 1)
        self.ask(network, peer, part, target, future)
        future.result()


@dataclass
class _Offer:
    version: int
    chunk: Chunk | None
    """None: all zeros."""
    base: int
    """Where in the whole the chunk's first byte lies."""
    on_taken: Callable[[], None] | None = None


class Offers:
    """What other ranks may ask us for."""

    def __init__(self, store: ChunkStore, network: Network):
        self._store = store
        self._network = network
        self._offers: dict[tuple[int, int], _Offer] = {}
        self._staging: Any = None
        self._is_staging_busy = False
        self._num_loans = 0
        self.num_gradient_changes = 0
        """How often reduced gradients have changed; the same on every rank after a backward."""
        network.provider = self._provide
        store.moves.wait_for_loan = self.wait_for_loan

    def use_staging(self, memory: memoryview) -> None:
        """Room to read what is on disk into."""
        self._staging = memory

    def offer(
        self,
        kind: Kind,
        label: str,
        version: int,
        chunk: Chunk | None,
        base: int = 0,
        on_taken: Callable[[], None] | None = None,
    ) -> None:
        """From now on others may have this version; `on_taken` each time somebody has got it."""
        with self._store.lock:
            self._offers[KINDS[kind], key_of(label)] = _Offer(version, chunk, base, on_taken)
        self._network.look_again()

    def offer_next(self, tier: GatherTier) -> None:
        """Our shard of a whole has new bytes: others get them when they have come as far."""
        tier.version += 1
        self.num_gradient_changes += tier.kind is Kind.GRAD
        if tier.shard is not None:
            self.offer(tier.kind, tier.label, tier.version, tier.shard, tier.own.low)

    def withdraw(self, kind: Kind, label: str) -> None:
        with self._store.lock:
            self._offers.pop((KINDS[kind], key_of(label)), None)

    # -- in the links' threads --------------------------------------------------------------------

    def _provide(self, wanted: Wanted, reply: Reply) -> bool:
        with self._store.lock:
            offer = self._offers.get((wanted.kind, wanted.key))
            if offer is None or offer.version < wanted.version:
                return False
            chunk = offer.chunk
            if offer.version > wanted.version:
                label = "nothing" if chunk is None else chunk.label
                reply(InternalError(f"{label} is at {offer.version} already"))
                return True
            low, high = wanted.low - offer.base, wanted.high - offer.base
            if chunk is None:
                loan = Loan([], lambda: None)
            elif chunk.is_resident:
                chunk.leases += 1
                chunk.loans += 1
                self._num_loans += 1
                loan = Loan(
                    cut_out(chunk.pieces(), low, high), lambda: self._give_back(chunk, offer)
                )
            else:
                return self._read_then_reply(offer, chunk, low, high, reply)
        reply(loan)
        return True

    def _give_back(self, chunk: Chunk, offer: _Offer) -> None:
        with self._store.lock:
            self._num_loans -= 1
            chunk.loans -= 1
            self._store.release([chunk])
            if offer.on_taken is not None:
                offer.on_taken()
        self._network.look_up()

    def wait_for_loan(self) -> bool:
        """In the training thread: let go of the lock until something comes back."""
        before = self._num_loans
        if not before:
            return False
        self._network.wait_until(lambda: self._num_loans < before, "a loan")
        return True

    def _read_then_reply(
        self, offer: _Offer, chunk: Chunk, low: int, high: int, reply: Reply
    ) -> bool:
        if self._is_staging_busy or self._staging is None:
            return False
        assert chunk.home is not None
        assert chunk.extent is not None
        self._is_staging_busy = True
        memory = self._staging[: chunk.layout.nbytes]

        def read(future: Future[None]) -> None:
            error = future.exception()
            if error is not None:
                self._is_staging_busy = False
                reply(InternalError(f"{chunk.label} cannot be read: {error}"))
            else:
                reply(Loan([(0, memory[low:high])], lambda: self._free_staging(offer)))

        chunk.home.read(chunk.extent, memory).add_done_callback(read)
        return True

    def _free_staging(self, offer: _Offer) -> None:
        self._is_staging_busy = False
        if offer.on_taken is not None:
            with self._store.lock:
                offer.on_taken()
            self._network.look_up()
        self._network.look_again()


def cut_out(pieces: Sequence[tuple[int, memoryview]], low: int, high: int) -> Pieces:
    """What lies in [low, high), counted from low."""
    found: Pieces = []
    for offset, memory in pieces:
        start, end = max(low, offset), min(high, offset + memory.nbytes)
        if start < end:
            found.append((start - low, memory[start - offset : end - offset]))
    return found


class GatherTier:
    """The lower tier of a whole that is split over the ranks: reading it asks them all."""

    name = "ranks"
    used_bytes = 0
    peak_bytes = 0
    bytes_read = 0
    bytes_written = 0
    seconds_busy = 0.0

    def __init__(
        self,
        store: ChunkStore,
        network: Network,
        kind: Kind,
        label: str,
        ranges: Sequence[Range],
    ):
        self._store = store
        self._network = network
        self.kind = kind
        self.label = label
        self._ranges = ranges
        self.own = ranges[network.rank]
        self.version = 0
        """The version that is asked for."""
        self.shard: Chunk | None = None
        """What this rank has of it; None when its range is empty."""

    def allocate(self, label: str, nbytes: int, describe: Describe | None = None) -> Extent:
        return Extent(label, nbytes, describe)

    def read(self, extent: Extent, target: memoryview) -> Future[None]:
        """Every rank's part, our own from its shard."""
        others = [r for r in self._network.peers if self._ranges[r].nbytes]
        has_own = self.shard is not None and not self.shard.is_empty
        future = PeerFuture(self._network, self.label, len(others) + has_own)
        offered = Offered(self.kind, self.label, self.version)
        for peer in others:
            part = self._ranges[peer]
            offered.ask(self._network, peer, part, target[part.low : part.high], future)
        if has_own:
            self._read_own(target[self.own.low : self.own.high], future)
        return future

    def _read_own(self, target: memoryview, future: PeerFuture) -> None:
        shard = self.shard
        assert shard is not None
        if not shard.is_resident and shard.fetching is None:
            assert shard.home is not None
            assert shard.extent is not None
            reading = shard.home.read(shard.extent, target)
            reading.add_done_callback(lambda done: future.part_done(done.exception()))
            return
        copy_resident(self._store, shard, target)
        future.part_done()

    def write(self, extent: Extent, pieces: Sequence[tuple[int, memoryview]]) -> Future[None]:
        """What the user changed in the whole: our part of it goes to our shard."""
        extent.num_writes += 1
        self.write_to_shard(pieces)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def write_to_shard(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Keep our part of a whole."""
        if self.shard is None or self.shard.is_empty:
            return
        self._store.lease([self.shard])
        try:
            ((_, here),) = self.shard.pieces()
            copy_into(here, cut_out(pieces, self.own.low, self.own.high))
            self._store.mark_changed(self.shard)
        finally:
            self._store.release([self.shard])

    def free(self, extent: Extent) -> None:
        extent.is_freed = True

    def close(self) -> None:
        return None
