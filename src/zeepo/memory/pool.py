"""Reusable buffers, each one anonymous mapping, all of them counted in a ledger.

Invariant: every mapped byte is in the ledger from before it is mapped until the pool lets go of
it: under the holder's tag while acquired, under "idle buffers" in between. An acquired buffer has
one holder; after `release()` its handle refuses every use, because the memory may have a new
holder. A reused buffer still contains what its last holder left there.
"""

import threading
from collections import OrderedDict

import torch

from zeepo.errors import InternalError
from zeepo.memory.ledger import Ledger, Reservation
from zeepo.memory.mapping import HUGE_PAGE_BYTES, PAGE_BYTES, Mapping, round_up

IDLE_TAG = "idle buffers"

# An idle buffer serves a request that fills at least this part of it; a worse fit wastes budget.
_MINIMUM_FILL = 1 / 1.25
_LEAST_GRAIN_BYTES = 128 << 10
_WHOLE_HUGE_PAGES_FROM = 8 * HUGE_PAGE_BYTES


class Buffer:
    """A holder's handle on page-aligned memory (2 MiB-aligned huge pages from 2 MiB on)."""

    __slots__ = ("_mapping", "_pool", "_reservation", "capacity_bytes", "fresh_bytes")

    def __init__(self, pool: "BufferPool", mapping: Mapping, reservation: Reservation) -> None:
        self._pool = pool
        self._mapping: Mapping | None = mapping
        self._reservation = reservation
        self.capacity_bytes = mapping.nbytes
        self.fresh_bytes = 0
        """Bytes that nobody has touched yet: in the ledger, not yet taken from the system."""

    @property
    def memory(self) -> memoryview:
        """The whole buffer, writable, one byte per item."""
        return self._held().memory

    @property
    def address(self) -> int:
        return self._held().address

    @property
    def tag(self) -> str:
        return self._reservation.tag

    def retag(self, tag: str) -> None:
        self._held()
        self._reservation.retag(tag)

    def storage(self, offset_bytes: int, nbytes: int) -> torch.UntypedStorage:
        """A torch storage that aliases `nbytes` of this buffer, without a copy.

        It keeps the mapping alive, but not the holder's right to it: after `release()` the bytes
        under it may change.
        """
        if offset_bytes < 0 or nbytes < 0 or offset_bytes + nbytes > self.capacity_bytes:
            raise InternalError(
                f"bytes {offset_bytes} to {offset_bytes + nbytes} lie outside a buffer of "
                f"{self.capacity_bytes} bytes"
            )
        memory = self.memory[offset_bytes : offset_bytes + nbytes]
        if nbytes == 0:  # torch.frombuffer refuses an empty buffer.
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def touched(self, nbytes: int | None = None) -> None:
        """The buffer was filled, or its first `nbytes`: their pages are taken from the system now.

        Pages that were handed on come first, fresh ones after them.
        """
        page_bytes = HUGE_PAGE_BYTES if self.capacity_bytes >= HUGE_PAGE_BYTES else PAGE_BYTES
        touched_bytes = self.capacity_bytes if nbytes is None else round_up(nbytes, page_bytes)
        left_bytes = max(0, self.capacity_bytes - touched_bytes)
        self._pool._forget_fresh(self, left_bytes)

    def release(self) -> None:
        """Give the buffer back to the pool; a second call does nothing."""
        self._pool._take_back(self)

    def shrink(self, nbytes: int) -> int:
        """Give back what lies beyond the first `nbytes`, in whole pages; how many bytes that is."""
        return self._pool._shrink(self, nbytes)

    def give_away(self) -> None:
        """Let the memory go to whoever still points at it: not counted and not reused any more."""
        self._pool._give_away(self)

    def _held(self) -> Mapping:
        if self._mapping is None:
            raise InternalError(
                f"a buffer of {self.capacity_bytes} bytes was used after its release"
            )
        return self._mapping


class BufferPool:
    """Hands out buffers within a ledger's limit and keeps released ones for reuse. Thread-safe."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.num_reuses = 0
        self.fresh_bytes = 0
        """Of all buffers together."""
        self.mapped_bytes = 0
        """Of all buffers, acquired or idle."""
        self._lock = threading.Lock()
        # Idle mappings, the longest idle first, by an arbitrary key.
        self._idle: OrderedDict[int, tuple[Mapping, Reservation]] = OrderedDict()
        self._idle_bytes = 0
        self._next_key = 0
        self._first_key_of_step = 0

    @property
    def idle_bytes(self) -> int:
        return self._idle_bytes

    def can_acquire(self, nbytes: int) -> bool:
        """Whether `acquire` would succeed now: idle buffers count as room."""
        capacity_bytes = _capacity_for(nbytes)
        with self._lock:
            if self._best_fit(capacity_bytes) is not None:
                return True
            return capacity_bytes <= self.ledger.headroom_bytes + self._idle_bytes

    def acquire(self, nbytes: int, tag: str) -> Buffer:
        """A buffer of at least `nbytes`, its contents arbitrary, or `BudgetError` with the bill."""
        with self._lock:
            capacity_bytes = self._capacity_with_room_for(nbytes)
            key = self._best_fit(capacity_bytes)
            if key is not None:
                mapping, reservation = self._idle.pop(key)
                self._idle_bytes -= mapping.nbytes
                self.num_reuses += 1
                reservation.retag(tag)
                return Buffer(self, mapping, reservation)
            missing_bytes = capacity_bytes - self.ledger.headroom_bytes
            givers: list[Mapping] = []
            # Drop idle buffers only if that makes enough room: a refusal should cost nothing.
            if missing_bytes <= self._idle_bytes:
                reused_bytes = capacity_bytes if capacity_bytes >= HUGE_PAGE_BYTES else 0
                givers = self._drop_idle(max(missing_bytes, min(reused_bytes, self._idle_bytes)))
            reservation = self.ledger.reserve(tag, capacity_bytes)
            try:
                mapping = Mapping(capacity_bytes)
            except OSError:
                reservation.release()
                raise
            self.mapped_bytes += capacity_bytes
            buffer = Buffer(self, mapping, reservation)
            buffer.fresh_bytes = capacity_bytes - self._move_pages(givers, mapping)
            self.fresh_bytes += buffer.fresh_bytes
            return buffer

    def _capacity_with_room_for(self, nbytes: int) -> int:
        """Large buffers are a little larger where there is room, so that those of nearly the same
        size (a layer with and without its norm) serve each other, and the pages of one can all go
        to another."""
        capacity_bytes = _capacity_for(nbytes)
        grain_bytes = 1 << (capacity_bytes.bit_length() - 7)
        if capacity_bytes >= _WHOLE_HUGE_PAGES_FROM:
            grain_bytes = max(grain_bytes, HUGE_PAGE_BYTES)
        if grain_bytes < _LEAST_GRAIN_BYTES:
            return capacity_bytes
        larger_bytes = round_up(capacity_bytes, grain_bytes)
        has_room = larger_bytes <= self.ledger.headroom_bytes + self._idle_bytes
        return larger_bytes if has_room else capacity_bytes

    def _move_pages(self, givers: list[Mapping], mapping: Mapping) -> int:
        """Fill a new mapping with the pages of dropped ones; what is left over stays in the pool.

        Returns how many bytes of the new mapping have pages.
        The new pages are untouched before, so memory never holds more than the ledger says.
        """
        filled_bytes = 0
        while givers:
            giver = givers.pop()
            taken_bytes = mapping.take_pages(filled_bytes, giver)
            filled_bytes += taken_bytes
            self._keep_rest(giver, taken_bytes)
        return filled_bytes

    def _keep_rest(self, giver: Mapping, taken_bytes: int) -> None:
        """What a dropped buffer has left goes back to the idle ones, if there is room for it."""
        rest_bytes = giver.nbytes
        if taken_bytes:
            rest_bytes = (rest_bytes - taken_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if not rest_bytes or not self.ledger.can_reserve(rest_bytes):
            return
        rest = giver
        if taken_bytes:
            rest = Mapping(rest_bytes)
            rest.take_pages(0, giver, taken_bytes)
        self.mapped_bytes += rest_bytes
        self._keep_idle(rest, self.ledger.reserve(IDLE_TAG, rest_bytes))

    def trim(self, nbytes: int | None = None) -> int:
        """Unmap `nbytes` or more of idle buffers (default all), longest idle first; bytes freed."""
        with self._lock:
            dropped = self._drop_idle(self._idle_bytes if nbytes is None else nbytes)
            return sum(mapping.nbytes for mapping in dropped)

    def end_step(self) -> None:
        """Unmap what nobody has needed for a whole step."""
        with self._lock:
            unused = [
                m.nbytes for key, (m, _) in self._idle.items() if key < self._first_key_of_step
            ]
            self._drop_idle(sum(unused))
            self._first_key_of_step = self._next_key

    def _best_fit(self, capacity_bytes: int) -> int | None:
        best_key, best_bytes = None, 0
        for key, (mapping, _) in self._idle.items():
            fits = mapping.nbytes * _MINIMUM_FILL <= capacity_bytes <= mapping.nbytes
            # "<=": among equals the most recently released, likelier to be in the caches.
            if fits and (best_key is None or mapping.nbytes <= best_bytes):
                best_key, best_bytes = key, mapping.nbytes
        return best_key

    def _drop_idle(self, nbytes: int) -> list[Mapping]:
        """Take mappings of at least `nbytes` out of the pool and the ledger; the caller unmaps."""
        dropped: list[Mapping] = []
        dropped_bytes = 0
        while self._idle and dropped_bytes < nbytes:
            _, (mapping, reservation) = self._idle.popitem(last=False)
            dropped.append(mapping)
            dropped_bytes += mapping.nbytes
            self._idle_bytes -= mapping.nbytes
            self.mapped_bytes -= mapping.nbytes
            reservation.release()
        return dropped

    def _forget_fresh(self, buffer: Buffer, left_bytes: int = 0) -> None:
        with self._lock:
            touched_bytes = max(0, buffer.fresh_bytes - left_bytes)
            self.fresh_bytes -= touched_bytes
            buffer.fresh_bytes -= touched_bytes

    def _take_back(self, buffer: Buffer) -> None:
        self._forget_fresh(buffer)
        with self._lock:
            mapping, buffer._mapping = buffer._mapping, None
            if mapping is None:
                return
            reservation = buffer._reservation
            reservation.retag(IDLE_TAG)
            self._keep_idle(mapping, reservation)

    def _shrink(self, buffer: Buffer, nbytes: int) -> int:
        with self._lock:
            mapping, before_bytes = buffer._held(), buffer.capacity_bytes
            mapping.shrink(nbytes)
            given_bytes = before_bytes - mapping.nbytes
            fresh_bytes = min(given_bytes, buffer.fresh_bytes)  # they come last
            buffer.fresh_bytes -= fresh_bytes
            self.fresh_bytes -= fresh_bytes
            buffer.capacity_bytes = mapping.nbytes
            self.mapped_bytes -= given_bytes
            buffer._reservation.shrink(mapping.nbytes)
        return given_bytes

    def _give_away(self, buffer: Buffer) -> None:
        self._forget_fresh(buffer)
        with self._lock:
            if buffer._mapping is not None:
                self.mapped_bytes -= buffer.capacity_bytes
                buffer._mapping = None
        buffer._reservation.release()

    def _keep_idle(self, mapping: Mapping, reservation: Reservation) -> None:
        self._idle[self._next_key] = (mapping, reservation)
        self._next_key += 1
        self._idle_bytes += mapping.nbytes


def _capacity_for(nbytes: int) -> int:
    if nbytes < 0:
        raise InternalError(f"cannot acquire a buffer of {nbytes} bytes")
    return max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
