"""The store's accounts: what it did, and what it says when there is no room."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from zeepo.chunks.choosing import Movable
from zeepo.chunks.chunk import Chunk, Kind
from zeepo.chunks.eviction import Candidate
from zeepo.chunks.layout import align_up
from zeepo.chunks.trace import Trace
from zeepo.memory.ledger import Ledger
from zeepo.memory.mapping import PAGE_BYTES
from zeepo.units import format_bytes

APART = 48
"""Two uses of a chunk that are so many accesses apart are two visits: it may leave in between."""


@dataclass
class StoreCounters:
    """What the store did since it was made."""

    num_fetches: int = 0
    num_prefetches: int = 0
    num_evictions: int = 0
    num_writes: int = 0
    seconds_waited: float = 0.0


def candidates(chunks: Iterable[Chunk], trace: Trace, residents: Container[int]) -> list[Candidate]:
    """What may leave RAM now."""
    return [
        Candidate(
            c.key, c.resident_bytes, trace.next_use(c.key), not c.is_dirty, c.key in residents
        )
        for c in chunks
        if c.leases == 0 and c.home is not None and (c.is_resident or c.fetching is not None)
    ]


def clean_candidates(
    chunks: Iterable[Chunk], trace: Trace, residents: Container[int]
) -> list[Candidate]:
    """What may leave RAM now at no cost, for something that is not needed yet."""
    clean = (c for c in chunks if not c.is_dirty and c.writing is None and c.key not in residents)
    return candidates(clean, trace, residents)


def movable_in_step(
    chunks: Iterable[Chunk], trace: Trace, versions: dict[int, int]
) -> list[Movable]:
    """The chunks that one step uses and that could stay; `versions` are those before the step."""
    visits = trace.visits(APART)
    return [
        Movable(
            c.key,
            c.layout.nbytes,
            (*visits[c.key], *[trace.last_use(c.key)] * (c.version != versions.get(c.key))),
        )
        for c in chunks
        if c.key in visits and c.home is not None and c.kind is not Kind.GRAD
        if not (c.is_copy or c.is_part or c.is_short_lived) and c.is_foreseeable
    ]


def can_be_made_stale(chunk: Chunk) -> bool:
    """Whether sabotage may drop a chunk's changes here (tests only)."""
    return (
        chunk.kind is Kind.STATE
        and chunk.is_resident
        and chunk.leases == 1
        and chunk.lower_version >= 0
        and chunk.writing is None
    )


def too_much_at_once(
    known: Iterable[Chunk], ledger: Ledger, wanted: Sequence[Chunk], limit_bytes: int | None
) -> str | None:
    """Why `wanted` cannot all be in RAM at the same time; None if they can."""
    if limit_bytes is None:
        return None
    keys = {chunk.key for chunk in wanted}
    needed = sum(align_up(max(1, chunk.layout.nbytes), PAGE_BYTES) for chunk in wanted)
    staying = sum(
        chunk.resident_bytes
        for chunk in known
        if (chunk.leases or chunk.home is None) and chunk.key not in keys
    )
    fixed_tags = [ledger.by_tag().get(tag, 0) for tag in ("staging", "copies")]
    room = limit_bytes - staying - sum(fixed_tags)
    if needed <= room:
        return None
    return (
        f"session.gathered needs {format_bytes(needed)} in ram at once, but only "
        f"{format_bytes(max(0, room))} of {format_bytes(limit_bytes)} for training state "
        f"can be had. Raise ram by at least {format_bytes(needed - room)}, or gather fewer "
        "parameters at a time."
    )


def no_room_message(chunks: Iterable[Chunk], ledger: Ledger, nbytes: int) -> str:
    """Why `nbytes` cannot be had: what is held, what cannot leave, what to try."""
    known = list(chunks)
    leased = [chunk for chunk in known if chunk.leases and chunk.resident_bytes]
    held = sum(chunk.resident_bytes for chunk in leased)
    fixed = sum(chunk.resident_bytes for chunk in known if chunk.home is None)
    limit = ledger.limit_bytes or 0
    give_disk = ", or give a disk" if fixed else ""
    bill = ", ".join(f"{tag} {format_bytes(n)}" for tag, n in ledger.by_tag().items())
    names = ", ".join(chunk.label for chunk in leased[:4]) + (" ..." if len(leased) > 4 else "")
    return (
        f"cannot place {format_bytes(nbytes)} in ram: "
        f"{format_bytes(max(0, limit - ledger.used_bytes))} free of {format_bytes(limit)} for "
        f"training state ({bill}); in use at this moment: {format_bytes(held)} "
        f"({names or 'nothing'}), kept in ram: {format_bytes(fixed)}. "
        f"Raise ram by at least {format_bytes(nbytes)}{give_disk}."
    )


def forked_message(owner_pid: int) -> str:
    """Why this process cannot use the store."""
    return (
        f"zeepo's session belongs to process {owner_pid}; this is its forked child {os.getpid()}, "
        "which cannot use the model's parameters. Give the child copies (clone(), state_dict()) "
        "made before the fork, or start it with spawn."
    )
