"""`update="backward"`: a chunk is updated as soon as backward has made its last gradient.

Its gradients then leave at once, so there are never more of them than one chunk's and what the
chunks after it are about to get. The numbers are those of `optimizer.step()`: hyperparameters are
fixed at the first update of a backward, and a program that would have computed something else is
refused, by name and before a wrong value is used:

- parameters or states that are used after their update and before the step, by a later node of the
  same backward or by anybody else: the values that plain PyTorch has there are gone;
- a second gradient of a parameter that was updated already (accumulation is declared by
  `session.no_sync()`, in which nothing is updated);
- gradients that are read, clipped or cleared before the step: they are gone;
- hyperparameters, or groups of parameters, that change between backward and step;
- a backward or a step with the gradients of the last step, which nobody has cleared: torch would
  use them again.

[Note: final gradients] A gradient is final when autograd has accumulated into the parameter as
often as in the last backward; in the first one, once, unless a nested backward did it (reentrant
checkpointing), after which more may come. A chunk is updated when all its trainable parameters
have their final gradients; what never gets there is left to `step()`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType

from torch import Tensor

from zeepo import events
from zeepo.chunks.chunk import Chunk
from zeepo.chunks.storages import is_in_backward
from zeepo.engine.ends_of_backward import EndsOfBackward
from zeepo.engine.managed import Home, read_autograd_grad, write_autograd_grad
from zeepo.engine.manager import Manager
from zeepo.engine.ordinary_context import ordinary_context
from zeepo.engine.step import OptimizerStep
from zeepo.engine.table import Table
from zeepo.engine.tables import Tables
from zeepo.engine.tuning import tuning
from zeepo.errors import SessionError, UnsupportedError
from zeepo.optim.catalogue import Grain
from zeepo.optim.shadow import Recipe

FRAMES_LOOKED_AT = 10
"""Between `zero_grad`, or a subclass's, and the property `grad` there are fewer."""


class BackwardUpdates:
    """Watches gradients arrive and updates the chunks they complete."""

    def __init__(self, manager: Manager, steps: Sequence[OptimizerStep]):
        _refuse_what_cannot_be(manager, steps)
        self._manager = manager
        self._step = steps[0]
        self._ends = EndsOfBackward(self._begin, self._end)
        self._no_sync = False
        """Inside `no_sync`: gradients add up, and another backward will come."""
        self._expected: Counter[int] = Counter()
        """id(home) -> how often autograd accumulated into the parameter in the last backward."""
        self._seen: Counter[int] = Counter()
        """The same of this backward, so far."""
        self._recipe: Recipe | None = None
        """What the updates of this step were made with; None before the first."""
        self._updated: set[int] = set()
        """PARAM chunks that were updated and whose step() has not come yet..."""
        self._guarded: list[tuple[Chunk, Callable[[], None] | None]] = []
        """...and every chunk that such an update changed, with what stands before its use else."""
        self._tables = Tables(manager, self._step, tuning().table_bytes)
        self._consumed: set[int] = set()
        """id(home) of every parameter that was updated before its step()."""
        self._gone: dict[int, str] = {}
        """id(home) -> name of those whose gradient plain PyTorch would still have after step()."""

    def install(self) -> None:
        self._ends.install()
        self._manager.gradients.on_arrival = self._arrived
        self._manager.gradients.use_up = self._use_up
        self._manager.find_lookup = self._tables.lookup
        self._manager.store.moves.let_rows_go = self._tables.let_go
        self._manager.node_leases.table_behind = self._tables.behind
        self._manager.gradients.check = self._refuse_if_consumed
        self._step.before_run = self._begin_step
        self._step.before_close = self._give_back

    def _give_back(self) -> None:
        """The session closes: values are given back as they are."""
        if self._consumed:
            events.warn(
                f"the session is closed after a backward() without optimizer.step(): with "
                f"update='backward' {len(self._consumed)} parameters were updated already, and "
                "come back so."
            )
        self._let_go()

    def remove(self) -> None:
        self._ends.remove()
        gradients = self._manager.gradients
        gradients.on_arrival = gradients.check = gradients.use_up = None
        self._manager.find_lookup = self._manager.node_leases.table_behind = None
        self._manager.store.moves.let_rows_go = None
        self._step.before_run = None
        self._let_go()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """`session.no_sync()`: another backward will come before the step."""
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    @property
    def _is_accumulating(self) -> bool:
        """Whether gradients that arrive now are not the last ones of the step."""
        turns = self._manager.node_leases.turns
        return self._no_sync or (turns is not None and not turns.is_last)

    # -- backward ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._consumed:
            raise SessionError(
                "a second backward() without optimizer.step(): with update='backward' the first "
                f"one has updated {len(self._updated)} units already. Accumulate by "
                "`with session.no_sync(): loss.backward()` for all but the last micro-batch, or "
                "use update='step'."
            )
        self._refuse_uncleared("backward()")
        self._manager.store.moves.spares.begin_backward()
        self._seen.clear()
        if self._is_accumulating:
            for chunk in self._manager.grad_chunks.values():
                chunk.is_short_lived = False

    def _arrived(self, home: Home) -> None:
        """Autograd has accumulated into a parameter, and its slot holds the sum."""
        if self._is_accumulating:
            return
        if id(home) in self._consumed:
            raise SessionError(
                f"{home.name} got another gradient after it was updated: with update='backward' "
                "each parameter must have its gradient when backward leaves it (reentrant "
                "checkpointing of a shared weight does not). Its values are neither those before "
                "the step nor those after it: go on from the last checkpoint with update='step'."
            )
        self._seen[id(home)] += 1
        if self._ends.is_nested and not self._expected[id(home)]:
            self._expected[id(home)] = 1 << 30  # not known: only step() can be sure
        homes = self._manager.slots[home.chunk.key]
        if all(self._is_final(h) for h in homes):
            self._update(home.chunk, homes)

    def _is_final(self, home: Home) -> bool:
        """[Note: final gradients]"""
        assert home.parameter is not None
        is_trained = home.parameter.requires_grad
        return not is_trained or self._seen[id(home)] >= max(1, self._expected[id(home)])

    def _update(self, chunk: Chunk, homes: Sequence[Home]) -> None:
        if chunk.raw_holds or self._step.torn is not None:
            return  # somebody sees its values by their address: left to step()
        self._tables.before_update(homes[0])
        updated = self._step.update_now(self._fixed_recipe(), chunk, homes)
        if not updated:
            return
        self._manager.grad_chunks[chunk.key].is_short_lived = True
        for home in updated:
            self._manager.gradients.drop(home)
        self._was_updated(chunk, updated)

    def _fixed_recipe(self) -> Recipe:
        if self._recipe is None:
            self._recipe = self._step.fix_recipe()
        return self._recipe

    def _was_updated(self, chunk: Chunk, updated: Sequence[Home]) -> None:
        self._consumed.update(map(id, updated))
        self._updated.add(chunk.key)
        for changed in self._step.changed_by_update(chunk):
            self._guarded.append((changed, changed.before_use))
            changed.before_use = partial(_refuse_use, changed)

    def _use_up(self, home: Home) -> bool:
        """Whether the gradient that autograd has left is one of rows of a table, and was used."""
        table = self._tables.of(home)
        if table is None or id(home) in self._consumed or self._is_accumulating:
            return False
        with self._manager.store.lock:  # another thread may look up rows
            return self._use_up_rows(home, table)

    def _use_up_rows(self, home: Home, table: Table) -> bool:
        assert home.parameter is not None
        gradient = read_autograd_grad(home.parameter)
        num_seen, num_expected = self._seen[id(home)] + 1, self._expected[id(home)]
        is_final = num_seen >= num_expected if num_expected else not self._ends.is_nested
        if home.grad is not None or gradient is None or not is_final:
            return False
        if self._step.torn is not None or not table.has_made(gradient):
            return False
        update = self._tables.count_update(table, self._fixed_recipe())
        if update is None:
            return False
        write_autograd_grad(home.parameter, None)
        del gradient
        with self._step.tearing(home.chunk), ordinary_context():
            table.update(update)
        self._seen[id(home)] += 1
        self._was_updated(home.chunk, [home])
        return True

    def _end(self, _: Sequence[Tensor]) -> None:
        self._manager.store.moves.spares.end_backward()
        if self._is_accumulating:
            return
        self._expected = Counter(self._seen)

    # -- the step ---------------------------------------------------------------------------------

    def _begin_step(self, recipe: Recipe) -> None:
        """`optimizer.step()`: the updates that were made are the ones it would have made."""
        self._refuse_uncleared("optimizer.step()")
        if self._recipe is not None and not (
            self._recipe.is_same_as(recipe) and self._step.has_groups_of_recipe()
        ):
            raise SessionError(
                "the optimizer's hyperparameters changed between backward() and step(), or which "
                "parameters have them: with update='backward' the parameters were updated with the "
                "former ones. Change them (or step the scheduler) after optimizer.step(), or use "
                "update='step'."
            )
        self._gone = {
            id(home): home.name
            for key in self._updated
            for home in self._manager.slots[key]
            if id(home) in self._consumed
        }
        self._let_go()

    def _refuse_uncleared(self, what: str) -> None:
        """The last step's gradients that nobody has cleared."""
        if self._gone:
            names = list(self._gone.values())
            raise SessionError(
                f"{what} before the gradients of the last step were cleared ({names[0]} and "
                f"{len(names) - 1} more): torch would use them again, and with update='backward' "
                "they are gone. Call optimizer.zero_grad() after each step, or use update='step'."
            )

    def _let_go(self) -> None:
        for chunk, before_use in self._guarded:
            chunk.before_use = before_use
        self._guarded.clear()
        self._updated.clear()
        self._consumed.clear()
        self._recipe = None

    def _refuse_if_consumed(self, home: Home, is_write: bool) -> None:
        """Somebody asks for a gradient, or sets it: between backward and step there is none."""
        if id(home) in self._gone and (is_write or _is_cleared_by_zero_grad(home)):
            del self._gone[id(home)]
        if id(home) in self._consumed:
            raise SessionError(
                f"the gradient of {home.name} is gone: with update='backward' the parameter was "
                "updated with it before backward() ended. Whoever reads, clips, unscales or "
                "clears gradients before optimizer.step() needs update='step'."
            )


def _is_cleared_by_zero_grad(home: Home) -> bool:
    """Whether a gradient is read by somebody's `zero_grad(set_to_none=True)`, which sees that there
    is none and leaves it so. To read it for another reason clears nothing."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(FRAMES_LOOKED_AT):
        if frame is None:
            return False
        if frame.f_code.co_name == "zero_grad" and "set_to_none" in frame.f_locals:
            if frame.f_locals["set_to_none"]:
                return True
            raise SessionError(
                f"zero_grad(set_to_none=False): the gradient of {home.name} is gone, and with "
                "update='backward' there is none to fill with zeros. torch would update a "
                "parameter with these zeros when a step does not use it: call "
                "zero_grad(set_to_none=True), or use update='step'."
            )
        frame = frame.f_back
    return False


def _refuse_use(chunk: Chunk) -> None:
    """Between a chunk's update and the step its old values would be needed."""
    if is_in_backward():
        raise SessionError(
            f"{chunk.label} is used in backward after it was updated: its weights are needed "
            "by a part of the graph that gives them no gradient (a detached or frozen use, a "
            "recomputed forward). Its old values are gone: go on from the last checkpoint "
            "with update='step'."
        )
    raise SessionError(
        f"{chunk.label} is used between backward() and optimizer.step(): with update='backward' it "
        "was updated already, and the values that plain PyTorch has at this point are gone. Read "
        "or change parameters and optimizer state after optimizer.step(), accumulate by "
        "`with session.no_sync(): loss.backward()` for all but the last micro-batch, or use "
        "update='step'."
    )


def _refuse_what_cannot_be(manager: Manager, steps: Sequence[OptimizerStep]) -> None:
    if manager.ranks is not None:
        raise UnsupportedError(
            "update='backward' works on one rank in this version. Use update='step'."
        )
    if len(steps) != 1:
        raise UnsupportedError(
            f"update='backward' needs exactly one optimizer, and there are {len(steps)}: backward "
            "cannot tell which of them will step. Use update='step'."
        )
    if steps[0].grain is Grain.WHOLE:
        kind = type(steps[0].optimizer).__name__
        raise UnsupportedError(
            f"update='backward' cannot take {kind} apart: it runs its own step() on all "
            "parameters. Use update='step', or an optimizer of torch.optim."
        )
