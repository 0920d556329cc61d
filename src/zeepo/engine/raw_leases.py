"""Leases for whoever has the address of a managed tensor's bytes: numpy, dlpack, C.

[Note: writing by address]
Nobody is told when such a holder writes. What a single rank has may count as written in any case.
Of what is split over the ranks there is only a copy here, and a change has to be made in all parts,
by all ranks together: so the bytes are compared with what they were, before a torch function
uses them, before backward and step, and when the lease ends.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import xxhash

from zeepo.chunks.storages import memory_of
from zeepo.chunks.store import Chunk, ChunkStore
from zeepo.engine.assembly import PartsTier
from zeepo.engine.managed import Home
from zeepo.errors import UnsupportedError
from zeepo.memory.pool import Buffer


class RawLeases:
    """What is held may be written by its holder: it counts as changed when the lease ends."""

    def __init__(self, store: ChunkStore, mark_changed: Callable[[Chunk], None]):
        self._store = store
        self._mark_changed = mark_changed
        self._copies: dict[int, _Seen] = {}
        """By key: copies that are held."""
        self._until_step: list[Chunk] = []
        self._of_the_dead: deque[Chunk] = deque()

    def for_life_of(self, home: Home, obj: object) -> None:
        """Keep a chunk resident while `obj` lives."""
        _refuse_in_pieces(home)
        self._begin(home.chunk)
        # Garbage is collected in any thread, also one we wait for: only note it there.
        weakref.finalize(obj, self._of_the_dead.append, home.chunk)

    def until_step(self, home: Home) -> None:
        """Keep a chunk resident until the next optimizer step."""
        _refuse_in_pieces(home)
        if not any(chunk is home.chunk for chunk in self._until_step):
            self._begin(home.chunk)
            self._until_step.append(home.chunk)

    def end_those_of_the_dead(self) -> None:
        while self._of_the_dead:
            self._end(self._of_the_dead.popleft())

    def end_all(self) -> None:
        """The step is over, or about to change what is held."""
        self.look_again()
        self.end_those_of_the_dead()
        for chunk in self._until_step:
            self._end(chunk)
        self._until_step.clear()

    def settle(self, chunks: Iterable[Chunk] | None = None) -> None:
        """[Note: writing by address] What was written so far is noted, of these or of all."""
        if self._copies:
            held = [seen.chunk for seen in self._copies.values()] if chunks is None else chunks
            for chunk in list(held):
                if chunk.key in self._copies:
                    self._note_writes(chunk)

    def look_again(self) -> None:
        """Copies may have been changed otherwise than by an address: that is how they are now."""
        for key, seen in self._copies.items():
            if (seen.buffer, seen.version) != (seen.chunk.buffer, seen.chunk.version):
                self._copies[key] = _look(seen.chunk)

    def _begin(self, chunk: Chunk) -> None:
        self._store.lease([chunk])
        chunk.raw_holds += 1
        if chunk.is_copy and chunk.key not in self._copies:
            self._copies[chunk.key] = _look(chunk)

    def _end(self, chunk: Chunk) -> None:
        if chunk.leases > 0:
            if chunk.is_copy:
                self._note_writes(chunk)
            else:
                self._mark_changed(chunk)
            self._store.release([chunk])
        chunk.raw_holds -= 1
        if not chunk.raw_holds:
            self._copies.pop(chunk.key, None)

    def _note_writes(self, chunk: Chunk) -> None:
        """Whoever changes a copy otherwise changes its version; an address does not."""
        before, now = self._copies[chunk.key], _look(chunk)
        same = (before.buffer, before.version) == (now.buffer, now.version)
        is_written = same and any(now.digests[i] != before.digests.get(i) for i in now.digests)
        self._copies[chunk.key] = now
        if is_written:
            self._mark_changed(chunk)
            now.version = chunk.version


@dataclass
class _Seen:
    """What a copy was when it was looked at."""

    chunk: Chunk
    buffer: Buffer | None
    version: int
    digests: dict[int, bytes]


def _look(chunk: Chunk) -> _Seen:
    present = chunk.present() if chunk.is_resident else []
    digests = {index: xxhash.xxh3_128_digest(memory_of(storage)) for index, storage in present}
    return _Seen(chunk, chunk.buffer, chunk.version, digests)


def _refuse_in_pieces(home: Home) -> None:
    if isinstance(home.chunk.home, PartsTier):
        raise UnsupportedError(
            f"{home.name} is large and kept in pieces: it has no address of its own that could "
            "be given to numpy, dlpack or C. Use a copy: .clone()."
        )
