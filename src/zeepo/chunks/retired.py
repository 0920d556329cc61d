"""Chunks of which somebody else has what they hold, for a while."""

from __future__ import annotations

from zeepo.chunks.chunk import NOWHERE, Chunk
from zeepo.chunks.store import ChunkStore


def retire(store: ChunkStore, chunk: Chunk) -> None:
    """Let go what a chunk holds, until `fill`. To fetch it before that is an error."""
    with store.lock:
        store.end_write(chunk)
        store.moves.finish_fetch(chunk)
        chunk.clear()
        chunk.lower_version = chunk.version
        chunk.expected_writes = NOWHERE


def fill(store: ChunkStore, chunk: Chunk) -> None:
    """Memory for all that a chunk has to hold, leased, for the caller to fill."""
    with store.lock:
        if chunk.is_resident:  # filled before, in part
            store.end_write(chunk)
            chunk.clear()
        nbytes = max(1, chunk.layout.nbytes)
        store.moves.make_buffer_room(nbytes)
        chunk.buffer = store.pool.acquire(nbytes, chunk.kind.value)
        chunk.place_in_buffer()
        chunk.is_resident = True
        chunk.version += 1
        chunk.leases += 1
