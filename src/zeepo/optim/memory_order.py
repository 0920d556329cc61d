"""Tensors as flat runs in one order in memory, which need not be that of their dimensions."""

from __future__ import annotations

from torch import Tensor


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The strides in which a tensor and its states are updated: its own if it has no gaps."""
    if tensor.is_contiguous() or not _is_dense(tensor):
        return _contiguous_strides(tensor)
    return tensor.stride()


class Flat:
    """A flat view of a tensor in the order of `strides`; a copy if it lies otherwise in memory."""

    def __init__(self, tensor: Tensor, strides: tuple[int, ...]):
        self._tensor = tensor
        self._copy: Tensor | None = None
        if tensor.dim() == 1 and tensor.is_contiguous():
            self.flat = tensor
            return
        if not _lies_as(tensor, strides):
            self._copy = tensor = tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)
        self.flat = tensor.as_strided((tensor.numel(),), (1,))

    def write_back(self) -> None:
        """What was done to a copy is done to the tensor."""
        if self._copy is not None:
            self._tensor.copy_(self._copy)


def _lies_as(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether its elements are in this order; the stride of a dimension of 1 says nothing."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return tensor.numel() == 0 or all(n == 1 or own == wanted for n, own, wanted in pairs)


def _contiguous_strides(tensor: Tensor) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def _is_dense(tensor: Tensor) -> bool:
    """Whether it covers its memory without gaps and overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
