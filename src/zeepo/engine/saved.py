"""What is kept of a tensor that autograd saved: see [Note: saved tensors] in activations.py."""

from __future__ import annotations

import weakref
from collections import deque
from concurrent.futures import Future

import torch
from torch import Tensor

from zeepo.memory.tier import Extent

Ended = tuple[int, int, Extent | None, tuple[Future[None], Tensor] | None]
"""What is left of a `Saved` that is gone: number, bytes, extent, a read ahead."""


class Saved:
    """The bytes of one storage that backward will need; alive as long as a graph is."""

    __slots__ = (
        "__weakref__",
        "_ended",
        "alias",
        "extent",
        "handles",
        "is_part",
        "label",
        "nbytes",
        "number",
        "reading",
        "version_written",
    )  # fmt: skip

    def __init__(self, number: int, alias: Tensor, nbytes: int, ended: deque[Ended]):
        self.number = number
        self.alias: Tensor | None = alias
        """Keeps the memory; None while the bytes are on disk only."""
        self.nbytes = nbytes
        self.is_part = alias.numel() * alias.element_size() < nbytes
        """Of a storage of which more than this tensor is kept."""
        self.handles: list[weakref.ref[Handle]] = []
        self.label = f"activation {number} {tuple(alias.shape)}"
        self.extent: Extent | None = None
        """Where the bytes are on disk, once they were sent there."""
        self.version_written = 0
        """The version that was sent."""
        self.reading: tuple[Future[None], Tensor] | None = None
        self._ended = ended

    def has_bytes_of(self, tensor: Tensor) -> bool:
        """Whether what is kept, or on its way to disk, is what a tensor over it shows now."""
        return self.extent is None or self.version_written == tensor._version

    def __del__(self) -> None:  # in any thread, at any moment: only note it
        self._ended.append((self.number, self.nbytes, self.extent, self.reading))


class Weight:
    """What autograd holds instead of a managed tensor: the tensor, and its version by then."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.version = tensor._version


class Handle:
    """What autograd holds instead of a tensor: which bytes, and how they were looked at."""

    __slots__ = (
        "__weakref__", "_version_then", "dtype", "offset", "saved", "shape", "stride", "tensor",
        "version",
    )  # fmt: skip

    def __init__(self, saved: Saved, tensor: Tensor):
        self.saved = saved
        self.tensor: Tensor | None = tensor
        """While the bytes are in RAM: it knows whether they were changed."""
        self.version = self._version_then = tensor._version
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.stride, self.offset = tensor.stride(), tensor.storage_offset()
        saved.handles.append(weakref.ref(self))

    def let_go(self) -> None:
        """The bytes are on disk: later changes do not concern them."""
        if self.tensor is not None:
            self._version_then, self.tensor = self.tensor._version, None

    def check(self) -> None:
        """Raise if the bytes were changed after they were saved."""
        now = self._version_then if self.tensor is None else self.tensor._version
        check_version(self.shape, self.version, now)

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


def check_version(shape: torch.Size, saved_version: int, version: int) -> None:
    """Autograd's own check, which it leaves to whoever packs: nobody changed what was saved."""
    if version != saved_version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {list(shape)} is at version {version}; expected version "
            f"{saved_version} instead. Hint: enable anomaly detection to find the operation that "
            "failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
        )


def num_own_users(saved: Saved) -> int:
    """How many tensors of ours use the memory: the alias, and what handles keep."""
    handles = [handle for reference in saved.handles if (handle := reference()) is not None]
    tensors = [saved.alias, *(handle.tensor for handle in handles)]
    return len({id(tensor) for tensor in tensors if tensor is not None})
