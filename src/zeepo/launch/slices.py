"""Every rank takes its slice of every batch of a plain DataLoader.

The user's batch size stays the size of the batch of all ranks together. All of them draw the same
batches, so when a loader begins the ranks take over the first one's random numbers, and what was
drawn is compared at each backward (`digest`). A rank reads only the samples of its slice; those of
an IterableDataset it has to read all.

Only what is iterated with gradients enabled is sliced: an evaluation under `torch.no_grad()` sees
every sample on every rank, so that what the first rank prints is about all of them. A batch smaller
than the number of ranks leaves some without a sample: they compute one that counts nothing.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from zeepo.errors import UnsupportedError


def slice_of(length: int, rank: int, num_ranks: int) -> slice:
    """This rank's part of so many samples; the first ranks have one more when it does not go up."""
    share, rest = divmod(length, num_ranks)
    low = rank * share + min(rank, rest)
    return slice(low, low + share + (rank < rest))


class Slices:
    """Slices the batches of every DataLoader while it is installed."""

    def __init__(self, rank: int, num_ranks: int, store: Store):
        self._rank = rank
        self._num_ranks = num_ranks
        self._store = store
        self._num_begun = 0
        """Loaders that were begun in training."""
        self._undo: tuple[Any, Any] | None = None
        self.digest = b"\0" * 8
        """Tells the batches of the last loader apart, as far as they were taken from it."""
        self.num_samples: int | None = None
        """How many samples of the last batch are ours; 0 if what we have of it counts nothing."""

    def install(self) -> None:
        """Harmless when it is already."""
        if self._undo is not None:
            return
        begin, index_sampler = DataLoader.__iter__, DataLoader._index_sampler
        self._undo = (begin, index_sampler)
        slices = self

        def begin_sliced(loader: DataLoader[Any]) -> Iterator[Any]:
            if not slices._is_meant(loader):
                return begin(loader)
            return slices._begin(loader, begin)

        def sliced_sampler(loader: DataLoader[Any]) -> Any:
            whole = index_sampler.fget(loader)  # type: ignore[attr-defined]
            return _SlicedBatches(slices, whole) if slices._cuts_indices(loader) else whole

        DataLoader.__iter__ = begin_sliced  # type: ignore[method-assign,assignment]
        DataLoader._index_sampler = property(sliced_sampler)  # type: ignore[assignment]

    def remove(self) -> None:
        if self._undo is not None:
            DataLoader.__iter__, DataLoader._index_sampler = self._undo  # type: ignore[method-assign]
            self._undo = None

    @property
    def is_active(self) -> bool:
        """Whether a loader that begins now is to be sliced."""
        return self._undo is not None and torch.is_grad_enabled()

    def _is_meant(self, loader: DataLoader[Any]) -> bool:
        return self.is_active and not isinstance(loader.sampler, DistributedSampler)

    def _cuts_indices(self, loader: DataLoader[Any]) -> bool:
        is_map = not isinstance(loader.dataset, IterableDataset)
        return self._is_meant(loader) and is_map and loader.batch_sampler is not None

    def _begin(self, loader: DataLoader[Any], begin: Any) -> Iterator[Any]:
        if loader.batch_sampler is None:
            raise UnsupportedError(
                "a DataLoader with batch_size=None makes its own batches, and zeepo cannot tell "
                "how to slice them over ranks that num_gpus= has started. Give it a batch_size, "
                "or start the ranks with a launcher (zeepo run) and let each load its own."
            )
        self._share_random_numbers()
        kept: Any = loader._iterator  # of persistent workers
        is_old = kept is not None and not isinstance(kept._index_sampler, _SlicedBatches)
        if is_old and self._cuts_indices(loader):
            kept._index_sampler = _SlicedBatches(self, kept._index_sampler)
        batches = begin(loader)
        if isinstance(batches._index_sampler, _SlicedBatches):
            return _Watched(self, batches, batches._index_sampler)
        return self._slice_all(batches)

    def _share_random_numbers(self) -> None:
        """The first rank's are everybody's: samplers draw the same, whatever was drawn before."""
        number = self._num_begun
        self._num_begun += 1
        if self._rank == 0:
            self._store.set(f"random/{number}", _random_state())
            return
        _set_random_state(self._store.get(f"random/{number}"))
        if self._store.add(f"taken/{number}", 1) == self._num_ranks - 1:
            self._store.delete_key(f"random/{number}")
            self._store.delete_key(f"taken/{number}")

    def part_of(self, length: int) -> tuple[slice, int]:
        """Where our samples of a batch are, and how many count: one stands in for none."""
        part = slice_of(length, self._rank, self._num_ranks)
        count = part.stop - part.start
        return (part if count else slice(0, 1)), count

    def _slice_all(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            length = _length_of(batch)
            part, self.num_samples = self.part_of(length)
            yield _cut(batch, length, part)


class _SlicedBatches:
    """The samples that this rank loads of every batch."""

    def __init__(self, slices: Slices, whole: Any):
        self._slices = slices
        self._whole = whole
        self.drawn: deque[tuple[int, bytes]] = deque()
        """Of each batch that is on its way: how many of our samples count, and its digest."""

    def __iter__(self) -> Iterator[Any]:
        if not self._slices.is_active:
            yield from self._whole
            return
        self.drawn.clear()
        hasher = xxhash.xxh3_64()
        for indices in self._whole:
            drawn = list(indices)
            part, count = self._slices.part_of(len(drawn))
            hasher.update(repr(drawn).encode())
            self.drawn.append((count, hasher.digest()))
            yield drawn[part]

    def __len__(self) -> int:
        return len(self._whole)


class _Watched:
    """Batches of a loader; knows which one the user has."""

    def __init__(self, slices: Slices, batches: Any, sampler: _SlicedBatches):
        self._slices = slices
        self._batches = batches
        self._sampler = sampler

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._slices.num_samples, self._slices.digest = self._sampler.drawn.popleft()
        return batch

    def __len__(self) -> int:
        return len(self._batches)


def _length_of(batch: Any) -> int:
    """How many samples a collated batch has: the first dimension of its first tensor."""
    if isinstance(batch, Tensor) and batch.dim():
        return batch.shape[0]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for value in batch:
            if length := _length_of(value):
                return length
    return 0


def _cut(batch: Any, length: int, part: slice) -> Any:
    """The same structure with a part of its samples."""
    if isinstance(batch, Tensor):
        return batch[part] if batch.dim() and batch.shape[0] == length else batch
    if isinstance(batch, Mapping):
        return {key: _cut(value, length, part) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_cut(value, length, part) for value in batch))
    if isinstance(batch, (list, tuple)):
        if len(batch) == length and not any(isinstance(value, Tensor) for value in batch):
            return batch[part]
        return type(batch)(_cut(value, length, part) for value in batch)
    return batch


def _random_state() -> str:
    version, numbers, gauss = random.getstate()
    array = np.random.get_state(legacy=False)
    assert isinstance(array, dict)
    state = array["state"]
    return json.dumps(
        {
            "torch": torch.get_rng_state().tolist(),
            "python": [version, list(numbers), gauss],
            "numpy": [
                array["bit_generator"],
                [int(n) for n in state["key"]],
                int(state["pos"]),
                array["has_gauss"],
                array["gauss"],
            ],
        }
    )


def _set_random_state(text: bytes) -> None:
    state = json.loads(text)
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, key, *rest = state["numpy"]
    np.random.set_state((name, np.array(key, dtype=np.uint32), *rest))
