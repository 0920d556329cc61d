"""Adding the ranks' parts of a gradient: always in the order of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zeepo.chunks.store import Chunk
from zeepo.engine.sharded import Sharded

UNKNOWN = -1
"""Of how many samples a batch has."""


def weights_of(counts: Sequence[int]) -> list[float]:
    """What each rank's gradients are multiplied by; they add up to one.

    Equal shares when all batches are as large, or when one is unknown.
    """
    if len(set(counts)) == 1 or UNKNOWN in counts:
        return [1.0 / len(counts)] * len(counts)
    return [count / sum(counts) for count in counts]


def typed(flat: Tensor, sharded: Sharded, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Our range as tensors of the parameters' types: one for each run of slots of one type."""
    low = sharded.own.low
    return [flat[a - low : b - low].view(dtype) for a, b, dtype in _runs(sharded, dtypes)]


def _runs(
    sharded: Sharded, dtypes: Sequence[torch.dtype]
) -> Iterator[tuple[int, int, torch.dtype]]:
    run: tuple[int, int, torch.dtype] | None = None
    for slot, dtype in zip(sharded.whole.layout.slots, dtypes, strict=True):
        part = sharded.own.intersect(slot.offset_bytes, slot.end_bytes)
        if not part.nbytes:
            continue
        if run is not None and run[2] is dtype:
            run = (run[0], part.high, dtype)
        else:
            if run is not None:
                yield run
            run = (part.low, part.high, dtype)
    if run is not None:
        yield run


def scale_typed(
    flat: Tensor, factor: float, sharded: Sharded, dtypes: Sequence[torch.dtype]
) -> None:
    """Multiply flat bytes of our range, as what they are."""
    for view in typed(flat, sharded, dtypes):
        view.mul_(factor)


def add_typed(total: Tensor, more: Tensor, sharded: Sharded, dtypes: Sequence[torch.dtype]) -> None:
    """Add flat bytes of our range to others, as what they are."""
    pairs = zip(typed(total, sharded, dtypes), typed(more, sharded, dtypes), strict=True)
    for view, addend in pairs:
        view.add_(addend)


def add_zero(total: Tensor, sharded: Sharded, dtypes: Sequence[torch.dtype]) -> None:
    """What a rank without a gradient adds: it makes -0.0 into 0.0, as torch's DDP does."""
    for view in typed(total, sharded, dtypes):
        view.add_(0.0)


def flat_bytes(chunk: Chunk) -> Tensor:
    """The bytes of a leased chunk of one slot."""
    storage = chunk.storages[0]
    assert storage is not None
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
