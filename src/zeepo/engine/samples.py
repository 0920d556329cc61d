"""How many samples a rank's batch has, seen from the model's own forward.

Ranks whose batches differ in size (the last one of an epoch) contribute by their number of samples,
so that the mean over ranks is the mean over all samples. A batch's size is the first dimension of
the first tensor that the model's forward is given; models whose modules take the time dimension
first are not counted. Compiled ones are left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeepo.engine.first_batch import FirstBatch
from zeepo.engine.regions import is_compiled
from zeepo.engine.summing import UNKNOWN
from zeepo.launch import launching


class Samples:
    """Counts the samples of the last forward before each backward.

    The last, because one that is never followed by a backward may come before it (an evaluation
    with gradients enabled). It stays for a second backward of the same forward.
    """

    def __init__(self) -> None:
        self.first_batch = FirstBatch()
        self._watched: set[int] = set()
        self._is_counting = False
        self._count: int | None = None
        self._undo: list[Callable[[], None]] = []

    def watch(self, models: Sequence[nn.Module], *, counts: bool = True) -> None:
        """Count what these are given, or only compare the ranks' first batches."""
        self._watched = {id(model) for model in models}
        modules = [module for model in models for module in model.modules()]
        is_time_first = any(getattr(m, "batch_first", True) is False for m in modules)
        self._is_counting = counts and not is_time_first
        if not any(map(is_compiled, modules)):
            for cls in {type(model) for model in models}:
                self._watch(cls)

    def take(self) -> int:
        """Those of the last batch, or UNKNOWN. Whoever sliced it knows what only stands in for
        none, and how many there are where the forward could not be watched."""
        sliced = None if launching.slices is None else launching.slices.num_samples
        if sliced is not None and (self._count is None or (sliced, self._count) == (0, 1)):
            return sliced
        return UNKNOWN if self._count is None else self._count

    def stop(self) -> None:
        """Watch no more."""
        while self._undo:
            self._undo.pop()()

    def _watch(self, cls: Any) -> None:
        samples, original, is_own = self, cls.forward, "forward" in vars(cls)

        @functools.wraps(original)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(self) in samples._watched and torch.is_grad_enabled():
                arguments = (*args, *kwargs.values())
                samples.first_batch.see(arguments)
                samples._count = num_samples(arguments) if samples._is_counting else None
            return original(self, *args, **kwargs)

        cls.forward = forward

        def undo() -> None:
            if is_own:
                cls.forward = original
            else:
                del cls.forward

        self._undo.append(undo)


def num_samples(arguments: Iterable[Any]) -> int | None:
    """The first dimension of the first tensor, also one inside a list or a dictionary."""
    for value in arguments:
        if isinstance(value, Tensor):
            if value.dim() > 0:
                return value.shape[0]
        elif isinstance(value, (list, tuple, dict)):
            found = num_samples(value.values() if isinstance(value, dict) else value)
            if found is not None:
                return found
    return None
