"""Which chunks have to leave. Pure.

The best choice is the chunk whose next use is furthest away (Belady); the forecast comes from the
trace of the last step. To let a clean chunk go costs one read later, a changed one a write as well,
so a changed chunk counts as if it were needed sooner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CHANGED = 0.5
"""How much nearer a changed chunk's next use counts: leaving costs two transfers, not one."""


@dataclass(frozen=True)
class Candidate:
    """A resident chunk that nobody leases."""

    key: int
    nbytes: int
    next_use: float
    """Accesses from now until it is needed again; infinity when no use is foreseen."""
    is_clean: bool
    """The lower tier holds the same bytes: leaving costs nothing."""
    stays: bool = False
    """One of those that are kept from step to step: leaves when nothing else can."""


def choose_victims(
    candidates: Iterable[Candidate], needed_bytes: int, *, later_than: float = -1.0
) -> list[int] | None:
    """The keys to evict, in order, so that at least `needed_bytes` come free; None if it cannot be.

    Only candidates needed later than `later_than` are taken: a prefetch must not push out what is
    needed before the thing it prefetches.
    """
    ranked = sorted(
        (c for c in candidates if c.next_use > later_than and c.nbytes > 0),
        key=lambda c: (
            c.stays,
            -c.next_use * (1 if c.is_clean else CHANGED),
            not c.is_clean,
            c.key,
        ),
    )
    chosen: list[int] = []
    freed = 0
    for candidate in ranked:
        if freed >= needed_bytes:
            break
        chosen.append(candidate.key)
        freed += candidate.nbytes
    return chosen if freed >= needed_bytes else None
