"""Whether all ranks train on the same data: rarely meant, and nothing else would show it.

A rank that a launcher has started loads its own data. If nobody has told the loader which rank it
is on, all of them compute the same, and training is right but no faster than on one. So with the
size of its batch a rank tells a digest of what its models were given before the first backward that
is reduced; if all are the same, the first rank says so, once. Nothing is compared, and nothing
fails, where a model is given no tensors or such as cannot be read, or where zeepo slices batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from zeepo import events
from zeepo.engine.managed import plain_torch
from zeepo.engine.torch_functions import tensors_in
from zeepo.launch import launching
from zeepo.units import MiB

NOTHING = b"\0" * 8
"""The digest of no tensors."""
MOST_BYTES = MiB
"""Of each tensor; of a larger one every second, fourth, ... row or column is looked at."""
MOST_TENSORS = 4
"""Of each forward."""
MOST_LOOKS = 8
"""Backwards after which it is given up: somebody always has nothing to tell."""


class FirstBatch:
    """What this rank's models are given, until the ranks have compared it."""

    def __init__(self) -> None:
        self._hasher: xxhash.xxh3_64 | None = None
        self._num_looks = 0
        self._is_over = False

    def see(self, arguments: Iterable[Any]) -> None:
        """A model is about to compute with these."""
        if self._is_over or torch.compiler.is_compiling() or _is_sliced():
            return
        digest = digest_of_tensors(arguments)
        if digest is not None:
            self._hasher = self._hasher or xxhash.xxh3_64()
            self._hasher.update(digest)

    def take(self) -> bytes:
        """The digest of what was seen since the last time."""
        hasher, self._hasher = self._hasher, None
        return NOTHING if hasher is None else hasher.digest()

    def compare(self, told: Sequence[bytes], rank: int) -> None:
        """What all ranks told, by rank; the first one warns if it is the same."""
        if self._is_over:
            return
        self._num_looks += 1
        is_known = NOTHING not in told
        self._is_over = is_known or self._num_looks == MOST_LOOKS
        if is_known and rank == 0 and len(set(told)) == 1:
            events.warn(_advice(len(told)))


def digest_of_tensors(arguments: Iterable[Any]) -> bytes | None:
    """Of the first few; None if there are none, or one that cannot be read."""
    hasher, count = xxhash.xxh3_64(), 0
    found = (t for t in tensors_in(list(arguments)) if type(t) in (Tensor, nn.Parameter))
    with torch.no_grad(), plain_torch():
        for count, tensor in enumerate(found, start=1):
            try:
                hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                hasher.update(_bytes_of(tensor))
            except RuntimeError:  # one without memory: of torch.func, quantized, sparse
                return None
            if count == MOST_TENSORS:
                break
    return hasher.digest() if count else None


def _bytes_of(tensor: Tensor) -> Any:
    """Of elements all over it, without a copy of a large one."""
    part = tensor.detach()
    while part.nbytes > MOST_BYTES:
        longest = max(range(part.dim()), key=part.shape.__getitem__)
        part = part[(slice(None),) * longest + (slice(None, None, 2),)]
    whole = part.resolve_conj().resolve_neg().cpu().contiguous()
    return whole.view(-1).view(torch.uint8).numpy()


def _is_sliced() -> bool:
    """Whether batches are slices: they differ, or one stands in for none."""
    return launching.slices is not None and launching.slices.num_samples is not None


def _advice(num_ranks: int) -> str:
    seen = (
        f"all {num_ranks} ranks were given the same batch in the first step: they compute the "
        "same, and training is no faster than on one."
    )
    if launching.slices is not None:
        return (
            f"{seen} Of ranks that num_gpus= has started only the batches of a DataLoader are "
            "sliced: use one, or index your tensors by torch.distributed.get_rank()."
        )
    return (
        f"{seen} Give each rank its own part: DataLoader(..., sampler=DistributedSampler(dataset))"
        f", or zeepo.init(num_gpus={num_ranks}) without a launcher, which slices the batches."
    )
