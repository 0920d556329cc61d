"""The beginning and the end of a backward pass, seen wherever it was called.

`loss.backward()`, `torch.autograd.backward` and reentrant checkpointing all come through one
function of torch's; the end of the outermost call is the end of the backward.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_AUTOGRAD: Any = torch.autograd
AtEnd = Callable[[Sequence[Tensor]], None]
"""Called with what backward started from; nothing, when its graph is kept for another."""


class EndsOfBackward:
    """Calls functions around every backward that leaves gradients on parameters."""

    def __init__(self, at_begin: Callable[[], None], at_end: AtEnd):
        self._at_begin = at_begin
        self._at_end = at_end
        self._depths = threading.local()
        self._original: Any = None

    @property
    def is_nested(self) -> bool:
        """Whether a backward runs inside another (reentrant checkpointing)."""
        return self._depth > 1

    @property
    def _depth(self) -> int:
        """Of this thread: several may run backward side by side."""
        return getattr(self._depths, "value", 0)

    @_depth.setter
    def _depth(self, value: int) -> None:
        self._depths.value = value

    def install(self) -> None:
        self._original = original = _AUTOGRAD._engine_run_backward
        process = os.getpid()

        def run(*args: Any, **kwargs: Any) -> Any:
            is_ours = os.getpid() == process  # not a forked child that tries the model on shapes
            is_watched = is_ours and self._depth == 0 and kwargs.get("accumulate_grad", True)
            if is_watched:
                self._at_begin()
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            if is_watched:
                keeps_graph = len(args) > 2 and args[2]
                self._at_end(() if keeps_graph else args[0])
            return result

        _AUTOGRAD._engine_run_backward = run

    def remove(self) -> None:
        if self._original is not None:
            _AUTOGRAD._engine_run_backward = self._original
            self._original = None
