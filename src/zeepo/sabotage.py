"""Switches that break the engine on purpose, one per named wait and move. Test-only.

A parity suite is worth what it catches: each site below makes one wait or move go wrong, and the
mutation tests assert that parity then fails. Nothing in zeepo ever turns a site on by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

SITES: dict[str, str] = {
    "fetch.wait": "a lease returns before the read into its buffer is done",
    "evict.wait": "a buffer is given back before its write is done",
    "evict.write": "a changed chunk is dropped without being written",
    "write.clean": "a chunk changed while it was written counts as clean",
    "dirty.mark": "a user's in-place change is not noted",
    "update.mark": "an optimizer update is not noted",
    "slot.offset": "a fetched slot points 64 bytes beside its place",
    "grad.drop": "a second contribution to a gradient is lost",
    "grad.overwrite": "a second contribution to a gradient replaces the first",
    "backward.lease": "backward uses whatever is in the weight's old buffer",
    "state.small": "the optimizer's scalar state is not kept",
    "state.stale": "an optimizer state is read from the lower tier although a newer one is in RAM",
    "update.skip": "one chunk's update is skipped",
    "update.late": "an update that was put off is not done when its chunk is used",
    "recipe.copy": "a learning rate kept in a tensor is not copied when a step fixes it",
    "activation.write": "an activation is changed while it is written",
    "activation.wait": "backward uses an activation before the read into its buffer is done",
    "recompute.random": "a recomputation draws other random numbers than the forward did",
    "recompute.modules": "a recomputation changes the module's buffers a second time",
    "zero.keep": "zero_grad leaves the old gradient in its slot",
}

_active: set[str] = set()


def sabotaged(site: str) -> bool:
    """True when a test has broken this site."""
    return site in _active


@contextmanager
def sabotage(site: str) -> Iterator[None]:
    """Break one site inside the block."""
    if site not in SITES:
        raise KeyError(f"no sabotage site {site!r}; there are {', '.join(sorted(SITES))}")
    _active.add(site)
    try:
        yield
    finally:
        _active.discard(site)
