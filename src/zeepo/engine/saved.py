"""What is kept of a tensor that autograd saved: see [Note: saved tensors] in activations.py."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

import torch
from torch import Tensor

from zeepo.memory.pool import Buffer
from zeepo.memory.tier import Extent

Ended = tuple[int, int, Extent | None, tuple[Future[None], Buffer] | None]
"""What is left of a `Saved` that is gone: number, bytes, extent, a read ahead."""


class Saved:
    """The bytes of one storage that backward will need; alive as long as a graph is."""

    __slots__ = ("__weakref__", "_ended", "alias", "extent", "label", "nbytes", "number", "reading")

    def __init__(self, number: int, alias: Tensor, nbytes: int, ended: deque[Ended]):
        self.number = number
        self.alias: Tensor | None = alias
        """Keeps the memory; None while the bytes are on disk only."""
        self.nbytes = nbytes
        self.label = f"activation {number} {tuple(alias.shape)}"
        self.extent: Extent | None = None
        """Where the bytes are on disk, once they were sent there."""
        self.reading: tuple[Future[None], Buffer] | None = None
        self._ended = ended

    def __del__(self) -> None:  # in any thread, at any moment: only note it
        self._ended.append((self.number, self.nbytes, self.extent, self.reading))


class Handle:
    """What autograd holds instead of a tensor: which bytes, and how they were looked at."""

    __slots__ = ("dtype", "offset", "saved", "shape", "stride")

    def __init__(self, saved: Saved, tensor: Tensor):
        self.saved = saved
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.stride, self.offset = tensor.stride(), tensor.storage_offset()

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)
