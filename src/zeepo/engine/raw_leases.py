"""Leases for whoever has the address of a managed tensor's bytes: numpy, dlpack, C."""

from __future__ import annotations

import weakref
from collections import deque

from zeepo.chunks.store import Chunk, ChunkStore
from zeepo.engine.assembly import PartsTier
from zeepo.engine.managed import Home
from zeepo.errors import UnsupportedError


class RawLeases:
    """What is held may be written by its holder: it counts as changed when the lease ends."""

    def __init__(self, store: ChunkStore):
        self._store = store
        self._until_step: list[Chunk] = []
        self._of_the_dead: deque[Chunk] = deque()

    def for_life_of(self, home: Home, obj: object) -> None:
        """Keep a chunk resident while `obj` lives."""
        _refuse_in_pieces(home)
        self._store.lease([home.chunk])
        home.chunk.raw_holds += 1
        # Garbage is collected in any thread, also one we wait for: only note it there.
        weakref.finalize(obj, self._of_the_dead.append, home.chunk)

    def until_step(self, home: Home) -> None:
        """Keep a chunk resident until the next optimizer step."""
        _refuse_in_pieces(home)
        if not any(chunk is home.chunk for chunk in self._until_step):
            self._store.lease([home.chunk])
            home.chunk.raw_holds += 1
            self._until_step.append(home.chunk)

    def end_those_of_the_dead(self) -> None:
        while self._of_the_dead:
            self._end(self._of_the_dead.popleft())

    def end_all(self) -> None:
        """The step is over, or about to change what is held."""
        self.end_those_of_the_dead()
        for chunk in self._until_step:
            self._end(chunk)
        self._until_step.clear()

    def _end(self, chunk: Chunk) -> None:
        chunk.raw_holds -= 1
        if chunk.leases > 0:
            self._store.mark_changed(chunk)
            self._store.release([chunk])


def _refuse_in_pieces(home: Home) -> None:
    if isinstance(home.chunk.home, PartsTier):
        raise UnsupportedError(
            f"{home.name} is large and kept in pieces: it has no address of its own that could "
            "be given to numpy, dlpack or C. Use a copy: .clone()."
        )
