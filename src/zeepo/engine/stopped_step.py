"""A step that a tier's error stopped between two updates: what is left of it waits.

The disk was full, say. The updates that were not made wait like those that were put off: the next
use of their chunks makes them, or the next call of `step()`. So the step counts as taken, and a
program that frees some space and goes on has the numbers of one that was never stopped. Called
again with the gradients it had, `step()` only finishes what it began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from zeepo.engine.update import ChunkUpdate
from zeepo.errors import BudgetError, DiskError

Gradients = Sequence[Tensor | None]


def can_be_continued(error: BaseException, updates: Sequence[ChunkUpdate]) -> bool:
    """Whether updates of which the first was stopped by an error can be made later: nothing of it
    is half done, and nobody reads their values by address meanwhile."""
    is_of_tier = isinstance(error, (BudgetError, DiskError))
    return is_of_tier and not any(u.is_torn or u.is_held_by_address for u in updates)


class StoppedStep:
    """What tells whether a call of `step()` is the same one again."""

    def __init__(
        self, optimizer: Optimizer, gradients: Gradients, finish: Callable[[], None]
    ) -> None:
        self._gradients = [None if g is None else (ref(g), g._version) for g in gradients]
        # States that do not exist yet cannot be asked for one by one.
        self._hook = optimizer.register_state_dict_pre_hook(lambda _: finish())

    def is_called_again(self, gradients: Gradients) -> bool:
        """Whether these are the gradients it had, unchanged."""
        is_as_many = len(gradients) == len(self._gradients)
        return is_as_many and all(map(_is_same, self._gradients, gradients))

    def end(self) -> None:
        """Everything is done."""
        self._hook.remove()


def _is_same(then: tuple[ref[Tensor], int] | None, now: Tensor | None) -> bool:
    if then is None or now is None:
        return then is None and now is None
    gradient, version = then
    return gradient() is now and version == now._version
