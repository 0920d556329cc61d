"""The loss of all ranks' slices together, when zeepo has sliced the batch.

A program that was written for one process prints `loss.item()` and means the whole batch. After
backward, the tensor that it was called on holds the mean over all slices, weighted as the gradients
are. Not after `backward(retain_graph=True)`: another backward may need the old value.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from zeepo.engine.managed import plain_torch
from zeepo.engine.ranks import Ranks
from zeepo.engine.reduction import Reduction
from zeepo.engine.sharded import Subject
from zeepo.errors import RankError
from zeepo.launch import launching

_FACT = "<?d8s"


def share_loss(ranks: Ranks, reduction: Reduction, roots: Sequence[Tensor]) -> None:
    """After a backward: compare the batches, and put the mean where the loss was."""
    slices = launching.slices
    if slices is None:
        return
    weights = reduction.weigh()
    root = roots[0] if len(roots) == 1 and _is_loss(roots[0]) else None
    with torch.no_grad(), plain_torch():
        value = 0.0 if root is None else float(root)
        mine = struct.pack(_FACT, root is not None, value, slices.digest)
        told = ranks.network.collect(Subject.LOSS, reduction.num_backwards, mine, "the loss")
        facts = [struct.unpack(_FACT, fact) for fact in told]
        _refuse_other_batches([digest for _, _, digest in facts])
        if root is not None and all(has_loss for has_loss, _, _ in facts):
            losses = zip(weights, (loss for _, loss, _ in facts), strict=True)
            root.data.fill_(sum(weight * loss for weight, loss in losses if weight))


def _is_loss(root: Tensor) -> bool:
    return root.numel() == 1 and root.dtype.is_floating_point


def _refuse_other_batches(digests: Sequence[bytes]) -> None:
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise RankError(
            f"rank {differing[0]} drew another batch than rank 0. Ranks that num_gpus= has started "
            "take slices of the same batches: the sampler must draw the same on each of them. Seed "
            "its own random generator, and begin the same loaders on every rank."
        )
