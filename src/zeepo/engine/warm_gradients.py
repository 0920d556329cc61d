"""Makes a large gradient in the memory of one that went before.

A parameter's gradient is allocated in C++. While the node runs that makes it, a dispatch mode hands
it memory that is there already (`memory/spares.py`). A matrix product (`mm`, of `F.linear` and `@`)
is the same kernel on the same operands, and so the same bits. The gradient of an embedding is zeros
to which rows are added in the order of the tokens, which is what torch's own kernel does; with more
tokens than rows it is left to that kernel, whose threads divide the rows among them, and so are
narrow numbers. All else passes through. Where somebody has a dispatch mode of his own, or the
gradient is to have a graph, nothing is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _python_dispatch

_mm = torch.ops.aten.mm
_embedding = torch.ops.aten.embedding_dense_backward.default
_NODES = frozenset({"MmBackward0", "AddmmBackward0", "EmbeddingBackward0"})
_EXACT = (torch.float32, torch.float64)
"""Sums of narrower numbers are rounded more often here than in torch's kernel."""
_OTHERWISE = ("_saved_sparse", "_saved_scale_grad_by_freq")
"""Of an embedding: its gradient is not made in the way that is known here."""


class Memory(Protocol):
    """Where gradients get memory from."""

    def take(self, nbytes: int) -> UntypedStorage | None:
        """Memory that is there; if there is none any more, room for it is made."""

    def take_zeros(self, rows: Tensor) -> UntypedStorage | None:
        """Memory that is zeros already, for a gradient to which only these rows are added."""

    def expect(self, nbytes: int) -> None:
        """Torch will take so much all the same."""

    def is_managed(self, tensor: Tensor) -> bool:
        """Whether it is a parameter, or a view of one."""


def is_known(node: Any) -> bool:
    """Whether the large gradient that a node makes can be made in memory that is there."""
    return node.name() in _NODES and not any(getattr(node, name, False) for name in _OTHERWISE)


def can_begin() -> bool:
    """Whether nobody would notice."""
    return not torch.is_grad_enabled() and not torch._C._len_torch_dispatch_stack()


class WarmGradient(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One gradient of so many bytes is made in memory that is there; on between `begin` and
    `end`."""

    def __init__(self, nbytes: int, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._nbytes = nbytes
        self._memory = memory

    def begin(self) -> None:
        _python_dispatch._push_mode(self)

    def end(self) -> None:
        """Also long after an exception in between; others' modes stay."""
        stack = _python_dispatch._get_current_dispatch_mode_stack()
        if self not in stack:
            return
        above = []
        while (mode := _python_dispatch._pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _python_dispatch._push_mode(mode)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = None
        if not types:  # of operands that have ways of their own
            if func is _mm.default:
                left, right = args
                if not any(map(self._memory.is_managed, args)):  # with the weight: of the input
                    out = self._warm((left.shape[0], right.shape[1]), left)
                if out is not None:
                    return _mm.out(left, right, out=out)
            elif func is _embedding:
                grad, indices, num_rows, padding, is_scaled = args
                can_add = not is_scaled and grad.dtype in _EXACT and indices.numel() <= num_rows
                out = self._warm_rows(grad, num_rows, indices, can_add)
                if out is not None:
                    return _add_rows(out, grad, indices, padding)
        return func(*args, **(kwargs or {}))

    def _warm_rows(self, grad: Tensor, num_rows: int, rows: Tensor, can_add: bool) -> Tensor | None:
        """Zeros."""
        shape = (num_rows, grad.shape[-1])
        if not self._is_it(shape, grad):
            return None
        if not can_add:
            self._nbytes = -1
            self._memory.expect(shape[0] * shape[1] * grad.element_size())
            return None
        zeros = self._memory.take_zeros(rows)
        if zeros is not None:
            self._nbytes = -1
            return _over(zeros, shape, grad)
        out = self._warm(shape, grad)
        return None if out is None else out.zero_()

    def _is_it(self, shape: tuple[int, int], like: Tensor) -> bool:
        return shape[0] * shape[1] * like.element_size() == self._nbytes

    def _warm(self, shape: tuple[int, int], like: Tensor) -> Tensor | None:
        """Memory for a gradient of that shape, once."""
        memory = self._memory.take(self._nbytes) if self._is_it(shape, like) else None
        if memory is None:
            return None
        self._nbytes = -1
        return _over(memory, shape, like)


def _over(memory: UntypedStorage, shape: tuple[int, int], like: Tensor) -> Tensor:
    return torch.empty(0, dtype=like.dtype).set_(memory, 0, shape, (shape[1], 1))


def _add_rows(out: Tensor, grad: Tensor, indices: Tensor, padding: int) -> Tensor:
    """The gradient of an embedding in `out`, which is zeros."""
    rows, indices = grad.reshape(-1, grad.shape[-1]), indices.flatten()
    if padding >= 0:
        is_used = indices != padding
        rows, indices = rows[is_used], indices[is_used]
    return out.index_add_(0, indices, rows)
