"""The store's accounts: what it did, and what it says when there is no room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zeepo.chunks.chunk import Chunk
from zeepo.memory.ledger import Ledger
from zeepo.units import format_bytes


@dataclass
class StoreCounters:
    """What the store did since it was made."""

    num_fetches: int = 0
    num_prefetches: int = 0
    num_evictions: int = 0
    num_writes: int = 0
    bytes_fetched: int = 0
    bytes_evicted: int = 0
    seconds_waited: float = 0.0


def no_room_message(chunks: Iterable[Chunk], ledger: Ledger, nbytes: int) -> str:
    """Why `nbytes` cannot be had: what is held, what cannot leave, what to try."""
    known = list(chunks)
    leased = [chunk for chunk in known if chunk.leases and chunk.resident_bytes]
    held = sum(chunk.resident_bytes for chunk in leased)
    fixed = sum(chunk.resident_bytes for chunk in known if chunk.home is None)
    limit = ledger.limit_bytes or 0
    bill = ", ".join(f"{tag} {format_bytes(n)}" for tag, n in ledger.by_tag().items())
    names = ", ".join(chunk.label for chunk in leased[:4]) + (" ..." if len(leased) > 4 else "")
    return (
        f"cannot place {format_bytes(nbytes)} in ram: "
        f"{format_bytes(max(0, limit - ledger.used_bytes))} free of {format_bytes(limit)} for "
        f"training state ({bill}); in use at this moment: {format_bytes(held)} "
        f"({names or 'nothing'}), kept in ram: {format_bytes(fixed)}. "
        f"Raise ram by at least {format_bytes(nbytes)}, or give a disk."
    )
