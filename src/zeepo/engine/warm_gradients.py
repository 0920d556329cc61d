"""Makes a large gradient in the memory of one that went before.

A matrix product in backward (`mm`, of `F.linear` and `@`) allocates its result in C++. While the
node runs that makes a parameter's gradient, a dispatch mode hands that one product memory that is
there already (`memory/spares.py`): the same kernel on the same operands, and so the same bits. All
else passes through. Where somebody has a dispatch mode of his own, or the gradient is to have a
graph, nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _python_dispatch

_mm = torch.ops.aten.mm
NODES = frozenset({"MmBackward0", "AddmmBackward0"})
Take = Callable[[int], UntypedStorage | None]


def can_begin() -> bool:
    """Whether nobody would notice."""
    return not torch.is_grad_enabled() and not torch._C._len_torch_dispatch_stack()


class WarmProducts(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One matrix product of so many bytes is made in memory that `take` has; on between `begin` and
    `end`."""

    def __init__(self, nbytes: int, take: Take) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._nbytes = nbytes
        self._take = take

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
        if func is not _mm.default or types:  # types: of operands that have ways of their own
            return func(*args, **(kwargs or {}))
        left, right = args
        shape = (left.shape[0], right.shape[1])
        out = self._warm(shape, left)
        return func(left, right) if out is None else _mm.out(left, right, out=out)

    def _warm(self, shape: tuple[int, int], like: Tensor) -> Tensor | None:
        """Memory for a product of that shape, once."""
        nbytes = shape[0] * shape[1] * like.element_size()
        memory = self._take(nbytes) if nbytes == self._nbytes else None
        if memory is None:
            return None
        self._nbytes = -1
        return torch.empty(0, dtype=like.dtype).set_(memory, 0, shape, (shape[1], 1))
