"""What one step foretells of the next: what to read ahead, what stays, what is in the way.

Called by the store under its lock. It asks `moves` to read and to evict, and waits for nothing. A
wrong foresight costs time, never a wrong value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from zeepo.chunks import moves as moving
from zeepo.chunks.accounts import clean_candidates, movable_in_step
from zeepo.chunks.chunk import Chunk
from zeepo.chunks.eviction import choose_victims
from zeepo.chunks.layout import align_up
from zeepo.chunks.moves import PAGE_BYTES, Moves
from zeepo.chunks.residents import LARGE_SHARE
from zeepo.errors import BudgetError
from zeepo.memory.spares import SPARE_TAG
from zeepo.memory.tier import Tier

SPOKEN_FOR_SHARE = 0.25
"""Of the budget, the most that reading ahead leaves to small gradients which come and go."""
SPEED_STEPS = 4
"""Steps whose transfers tell how fast they are."""
COPIES_KEPT = 2
"""How many copies of what is split over the ranks are kept, or read ahead, beside those in use."""


class Foresight:
    """Follows the trace of a store's chunks."""

    def __init__(self, moves: Moves):
        self._moves = moves
        self._versions: dict[int, int] = {}
        """Of all chunks, at the end of the last step."""
        self._speed = _Speed()
        self._accesses_to_skip = 0
        """How many accesses need not look what to read next."""
        self._short_lived_bytes = 0
        """The most that chunks held at once whose content comes from torch and goes soon."""

    def note_need(self, chunks: Sequence[Chunk]) -> None:
        """These are leased now, beside what is leased already and what torch has made."""
        limit, in_ram = self._moves.ledger.limit_bytes, self._moves.in_ram
        if limit is not None:
            held = [c for c in in_ram.values() if c.leases or c.is_short_lived]
            coming = [c for c in chunks if c.key not in in_ram and not c.is_short_lived]
            needed = sum(c.resident_bytes for c in held) + sum(c.layout.nbytes for c in coming)
            needed += self._moves.spares.nbytes
            worth_naming = LARGE_SHARE / 2 * limit  # the limit may be lower at another moment
            leased = (c.key for c in (*held, *coming) if c.layout.nbytes > worth_naming)
            self._moves.residents.note_lease(frozenset(leased), needed, limit)

    def let_copies_go(self) -> None:
        """Of copies of what is split over the ranks, keep the few that are needed soonest."""
        for chunk in self._idle_copies()[COPIES_KEPT:]:
            self._let_copy_go(chunk)

    def _idle_copies(self) -> list[Chunk]:
        """Not in use; what is needed soonest comes first, or what was used last."""
        idle = [
            c
            for c in self._moves.copies
            if not c.leases and c.home is not None and (c.fetching is not None or c.is_resident)
        ]
        return sorted(idle, key=lambda c: (self._moves.trace.next_use(c.key), -c.last_lease))

    def _let_copy_go(self, chunk: Chunk) -> bool:
        is_coming = chunk.fetching is not None and not chunk.fetching.done()
        if chunk.is_dirty or is_coming:
            return False
        self._moves.evict(chunk)
        return True

    def _make_way_for_copy(self, chunk: Chunk) -> bool:
        """Whether one more copy may be read ahead, in the place of one that is needed later."""
        idle = self._idle_copies()
        if len(idle) < COPIES_KEPT:
            return True
        is_later = self._moves.trace.next_use(idle[-1].key) > self._moves.trace.next_use(chunk.key)
        return is_later and self._let_copy_go(idle[-1])

    def read_ahead(self, leased: Sequence[Chunk]) -> None:
        """Start reading what comes next, as far as room can be had without harm.

        While much is ahead already, not at every access: there would be little to do. What is
        leased and empty is about to be filled, and has its room first.
        """
        if len(self._moves.in_ram) == len(self._moves.chunks):
            return
        if self._accesses_to_skip:
            self._accesses_to_skip -= 1
            return
        spoken_for = self._spoken_for_bytes()
        spoken_for += sum(c.layout.nbytes for c in leased if c.is_empty and not c.is_short_lived)
        for depth, key in enumerate(self._moves.trace.upcoming(moving.LOOKAHEAD_CHUNKS)):
            self._accesses_to_skip = depth // 4
            chunk = self._moves.chunks.get(key)
            if chunk is None or chunk.buffer is not None or not chunk.may_be_prefetched:
                continue
            if chunk.is_retired:
                continue
            nbytes = align_up(max(1, chunk.layout.nbytes), PAGE_BYTES)
            if chunk.is_empty:  # a gradient that is made before what follows here is needed
                spoken_for += 0 if chunk.is_short_lived else nbytes
                continue
            if chunk.is_resident or chunk.extent is None or chunk.is_dirty:
                continue
            if chunk.is_copy and not self._make_way_for_copy(chunk):
                continue
            if not self._moves.pool.can_acquire(nbytes + spoken_for) and not self._make_room(
                chunk, nbytes + spoken_for
            ):
                return
            try:
                self._moves.start_fetch(chunk)
            except BudgetError:  # there was room a moment ago, and reading ahead may wait
                return
            self._moves.counters.num_prefetches += 1

    def end_step(self) -> None:
        """A step is over: it is the forecast of the next, and tells what can stay."""
        self._moves.trace.end_step()
        self._accesses_to_skip = 0
        chunks = self._moves.chunks.values()
        movable = movable_in_step(chunks, self._moves.trace, self._versions)
        speed = self._speed.end_step(chunk.home for chunk in chunks if chunk.home is not None)
        self._moves.residents.end_step(movable, self._others_bytes(), speed)
        self._versions = {chunk.key: chunk.version for chunk in chunks}

    def _others_bytes(self) -> int:
        """What of the ledger is neither chunks nor free for them: a tier's own buffers, copies.
        What is kept for gradients counts by moments, now as theirs and now as nobody's."""
        held = sum(chunk.resident_bytes for chunk in self._moves.in_ram.values())
        held += self._moves.spares.nbytes
        return self._moves.ledger.used_bytes - self._moves.pool.idle_bytes - held

    def note_short_lived(self, chunk: Chunk) -> None:
        """Something came; if it will go soon, as much room is not worth filling meanwhile."""
        if chunk.is_short_lived:
            self._short_lived_bytes = max(self._short_lived_bytes, self._held_for_short())

    def _held_for_short(self) -> int:
        """Without guests, whose room is not the chunks', and what is in memory that was kept."""
        short_lived = (c for c in self._moves.in_ram.values() if c.is_short_lived)
        held = (r for c in short_lived for r in c.own_memory.values() if not r.is_guest)
        return sum(r.nbytes for r in held if r.tag != SPARE_TAG)

    def _spoken_for_bytes(self) -> int:
        """Room that reading ahead leaves to what torch is about to make: it would have to go."""
        if not self._short_lived_bytes:
            return 0
        missing = self._short_lived_bytes - self._held_for_short()
        return max(0, min(missing, int(SPOKEN_FOR_SHARE * (self._moves.ledger.limit_bytes or 0))))

    def _make_room(self, chunk: Chunk, nbytes: int) -> bool:
        """Make room for a prefetch from clean chunks that are needed later than it."""
        moves = self._moves
        missing = moves.missing_bytes(nbytes)
        later_than = moves.trace.next_use(chunk.key)
        for other in moves.in_ram.values():
            moves.collect_write(other)
        free = clean_candidates(
            self._moves.in_ram.values(), self._moves.trace, self._moves.residents.keys
        )
        victims = choose_victims(free, missing, later_than=later_than)
        if victims is None:
            return False
        for key in victims:
            moves.evict_unless_lent(moves.chunks[key])
        return moves.pool.can_acquire(nbytes)


class _Speed:
    """How fast bytes came and went while any were on their way."""

    def __init__(self) -> None:
        self._before = (0, 0.0)
        self._recent: deque[tuple[int, float]] = deque(maxlen=SPEED_STEPS)

    def end_step(self, tiers: Iterable[Tier]) -> float:
        """Bytes per second in the last steps; 0 where nobody knows."""
        different = {id(tier): tier for tier in tiers}.values()
        nbytes = sum(tier.bytes_read + tier.bytes_written for tier in different)
        seconds = sum(tier.seconds_busy for tier in different)
        moved = max(0, nbytes - self._before[0]), max(0.0, seconds - self._before[1])
        self._recent.append(moved)  # a tier that is gone has nothing
        self._before = nbytes, seconds
        moved_bytes = sum(each for each, _ in self._recent)
        busy_seconds = sum(busy for _, busy in self._recent)
        return moved_bytes / busy_seconds if busy_seconds > 0 else 0.0
