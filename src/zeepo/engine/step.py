"""One optimizer step, top to bottom.

`optimizer.step()` of an optimizer that zeepo runs does, in this order:

1. the user's step pre-hooks, then the closure if one was given (both by torch's own code);
2. carry out what the last step put off and nobody has asked for since;
3. collect which parameters have a gradient, by chunk, and which do not fit that scheme;
4. fix the recipe (hyperparameters and attributes) and make one update of each chunk;
5. an update that [can wait](update.py) is put off: its scalar states are counted now, its chunks
   are marked, and whoever first uses one of them, mostly the next forward, has it done before;
6. the others (a first step, whose states do not exist yet; raw addresses in use; all in RAM) are
   done now, in the order the next forward needs them (if the disk fails, [what is
   left](stopped_step.py) waits);
7. the trace of this step becomes the forecast of the next; the user's step post-hooks.

So the states of a unit come from disk while the unit before it computes, and a parameter is read
once for its update and its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeepo.chunks.store import Chunk
from zeepo.engine.managed import Home, home_of, plain_torch, read_autograd_grad
from zeepo.engine.manager import Manager
from zeepo.engine.odd_gradients import update_with_odd_gradient
from zeepo.engine.ordinary_context import is_ordinary_context, ordinary_context
from zeepo.engine.ranks import Ranks
from zeepo.engine.sharded import Sharded
from zeepo.engine.states import States
from zeepo.engine.step_facts import digest_of_state
from zeepo.engine.stopped_step import StoppedStep, can_be_continued
from zeepo.engine.tuning import Tuning
from zeepo.engine.update import ChunkUpdate, count_ahead
from zeepo.engine.update_parts import Target
from zeepo.errors import SessionError
from zeepo.optim.catalogue import Grain, grain_of, num_states_of, num_temporaries_of
from zeepo.optim.catch_up import PastUpdate
from zeepo.optim.shadow import Recipe, State, take_recipe
from zeepo.sabotage import sabotaged


class OptimizerStep:
    """Runs one optimizer of the user's over managed parameters."""

    def __init__(
        self,
        manager: Manager,
        optimizer: Optimizer,
        label: str,
        tuning: Tuning,
        adopt: Callable[[Sequence[Tensor]], None],
    ):
        self.optimizer = optimizer
        self._label = label
        self.grain = grain_of(optimizer)
        self._manager = manager
        self._store = manager.store
        self._adopt = adopt
        """Takes in parameters that came with add_param_group."""
        can_cut = self.grain is Grain.ELEMENT
        self.states = States(manager, optimizer, label, tuning.piece_bytes if can_cut else None)
        self._may_put_off = tuning.put_off and can_cut
        self._put_off: dict[int, ChunkUpdate] = {}
        """PARAM chunk -> its update, which waits for the chunk's next use."""
        self._entries: dict[Tensor, State] = {}
        self._group_of: dict[int, int] = {}
        """id(parameter) -> its group, for updates before the step."""
        self.torn: tuple[str, BaseException] | None = None
        """The chunk whose update failed when values had changed already, and by what."""
        self._stopped: StoppedStep | None = None
        """The step before, if an error stopped it and something of it still waits."""
        self.before_run: Callable[[Recipe], None] | None = None
        """Told what this step will do, when parts of it were done in backward already."""
        self.before_close: Callable[[], None] | None = None
        """Told that no step will come any more."""

    # -- the step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self) -> None:
        """Update every parameter that has a gradient, or see to it that it will be."""
        self._refuse_torn()
        self._manager.node_leases.refuse_inside_accumulate("optimizer.step()")
        is_same_again = self._stopped and self._stopped.is_called_again(self._gradients())
        self.finish_put_off()
        if is_same_again:
            return
        ranks = self._manager.ranks
        if ranks is not None:
            assert self._manager.reduction is not None
            self._manager.reduction.refuse_unreduced()
            self._manager.raw_leases.end_all()
            self._manager.raw_leases.settle()
        recipe = take_recipe(self.optimizer)
        if self.before_run is not None:
            self.before_run(recipe)
        by_chunk, odd = self._collect()
        if ranks is not None:
            names = [t.home.name for targets in by_chunk.values() for t in targets]
            ranks.begin_step(ranks.step_facts.encode(self._label, recipe.numbers, names))
        updates = [self._make_update(recipe, chunk, by_chunk[chunk]) for chunk in by_chunk]
        if sabotaged("update.skip"):
            del updates[1:2]
        now, later = self._divide(updates)
        self._put_off_all(recipe, later)
        if ranks is not None:
            self._update_with_ranks(ranks, now)
        else:
            self._update_all(self._in_order_of_next_use(now), began=bool(later), is_last=not odd)
        for target in odd:
            visible = self._entry(target[0])
            update_with_odd_gradient(self._manager, self.states, recipe, target, visible)
        self._publish_entries()

    def _update_all(
        self, updates: Sequence[ChunkUpdate], *, began: bool = False, is_last: bool = True
    ) -> None:
        """One after the other. What an error of a tier leaves undone waits, if nothing else comes
        after it; after others there is no second try once something has changed."""
        for number, update in enumerate(updates):
            try:
                update.run()
            except BaseException as error:
                if is_last and can_be_continued(error, updates[number:]):
                    self._stop(updates[number:])
                elif began or number or update.has_begun:
                    self.torn = update.chunk.label, error
                raise

    def _stop(self, updates: Sequence[ChunkUpdate]) -> None:
        """The rest of this step waits for its next use."""
        for update in updates:
            self._wait_for_use(update)
        self._stopped = StoppedStep(self.optimizer, self._gradients(), self.finish_put_off)

    def _gradients(self) -> list[Tensor | None]:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        homes = map(self._manager.home, parameters)
        return [None if home is None else self._manager.gradients.held(home) for home in homes]

    def _end_stopped(self) -> None:
        """After an update that waited: whether the whole step is done now."""
        if self._stopped is not None and not self._put_off:
            self._stopped.end()
            self._stopped = None
            self._publish_entries()

    @contextmanager
    def tearing(self, chunk: Chunk) -> Iterator[None]:
        """What fails inside leaves an update half done."""
        try:
            yield
        except BaseException as error:
            self.torn = chunk.label, error
            raise

    def _refuse_torn(self) -> None:
        if self.torn is not None:
            label, error = self.torn
            raise SessionError(
                f"the update of {label} failed half-way: what was updated before it would be "
                "updated again, and its own values may be neither those before the step nor those "
                "after it. Go on from the last checkpoint."
            ) from error

    def fix_recipe(self) -> Recipe:
        """What the step of this backward will do, for `update_now`."""
        self._group_of = self._find_groups()
        return take_recipe(self.optimizer)

    def _find_groups(self) -> dict[int, int]:
        groups = enumerate(self.optimizer.param_groups)
        return {id(p): index for index, group in groups for p in group["params"]}

    def has_groups_of_recipe(self) -> bool:
        """Whether each parameter is in the group it was in when the recipe was fixed."""
        return self._find_groups() == self._group_of

    def changed_by_update(self, chunk: Chunk) -> list[Chunk]:
        """Everything that the update of a PARAM chunk changes or that shows what it changed."""
        pieces = self.states.pieces(chunk)
        states = [state for piece in pieces for state in self.states.state_chunks(chunk, piece)]
        return [chunk, *states, *self.states.assembled(chunk)]

    @torch.no_grad()
    def update_now(self, recipe: Recipe, chunk: Chunk, homes: Sequence[Home]) -> list[Home]:
        """Update one chunk before the step; returns whose gradients that used up."""
        targets = []
        for home in homes:
            group, grad_home = self._group_of.get(id(home.parameter)), home_of(home.grad)
            if group is not None and grad_home is not None:
                targets.append(Target(home, group, grad_home, self._entry(home)))
            elif home.parameter is not None and read_autograd_grad(home.parameter) is not None:
                return []  # sparse, or with a graph: step() sees to it
        if targets:
            update = self._make_update(recipe, chunk, targets)
            with ordinary_context():
                self._update_all([update], is_last=False)
        return [target.home for target in targets]

    def has_all_states(self, home: Home, num_states: int) -> bool:
        """Whether a parameter has so many states in slots, and its optimizer makes no more."""
        group = self._find_groups().get(id(home.parameter))
        if group is None or self.grain is not Grain.ELEMENT:
            return False
        return num_states == self.states.expected(home, self.optimizer.param_groups[group])

    def count_update(self, recipe: Recipe, home: Home, num_states: int) -> PastUpdate | None:
        """One more update of a parameter that somebody else carries out: its scalar states are
        counted. None if it is not trained, or would get other states."""
        group = self._group_of.get(id(home.parameter))
        if group is None or self.states.expected(home, recipe.groups[group]) != num_states:
            return None
        target = Target(home, group, home, self._entry(home))
        with plain_torch():
            count_ahead(recipe, [target])
            assert home.parameter is not None
            torch.autograd.graph.increment_version([home.parameter])
        return PastUpdate(recipe, group, target.counters or {})

    def _update_with_ranks(self, ranks: Ranks, updates: Sequence[ChunkUpdate]) -> None:
        """Each rank updates what it owns; whole parameters then get the others' parts.

        In the same order on every rank, the exchange one chunk behind the update.
        """
        updated: list[Sharded] = []
        for update in sorted(updates, key=lambda u: u.chunk.key):
            sharded = ranks.sharded[update.chunk.key]
            update.run()
            ranks.updated(sharded)
            self.states.offer_to_ranks(update.chunk)
            updated.append(sharded)
            if len(updated) > 1:
                ranks.exchange(updated[-2])
        if updated:
            ranks.exchange(updated[-1])
        ranks.end_step()
        if updates and updates[0].unscales:  # nobody needs them as they were any more
            assert self._manager.reduction is not None
            for sharded in updated:
                whole = self._manager.grad_chunks[sharded.whole.key]
                self._manager.reduction.written_by_update(whole)

    def _collect(self) -> tuple[dict[Chunk, list[Target]], list[tuple[Home, int]]]:
        """Parameters with a gradient: by chunk; and those whose gradient is not in a slot."""
        self._adopt([p for group in self.optimizer.param_groups for p in group["params"]])
        by_chunk: dict[Chunk, list[Target]] = {}
        odd: list[tuple[Home, int]] = []
        for group_index, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                home = self._manager.home(p)
                assert home is not None
                grad = self._manager.gradients.held(home)
                grad_home = home_of(grad)
                if grad_home is not None:
                    target = Target(home, group_index, grad_home, self._entry(home))
                    by_chunk.setdefault(home.chunk, []).append(target)
                elif grad is not None:
                    odd.append((home, group_index))
        return by_chunk, odd

    def _make_update(self, recipe: Recipe, chunk: Chunk, targets: list[Target]) -> ChunkUpdate:
        self._store.make_ready([chunk])  # another optimizer may have put off its own
        for target in targets:
            self.states.take_in_all(target.home, target.entry)
        self.states.settle_wholes(chunk)
        counts = num_states_of(self.optimizer), num_temporaries_of(self.optimizer)
        return ChunkUpdate(self._manager, self.states, recipe, chunk, targets, *counts)

    def _divide(
        self, updates: Sequence[ChunkUpdate]
    ) -> tuple[list[ChunkUpdate], list[ChunkUpdate]]:
        """What has to be done now, and what can wait."""
        if not self._may_put_off or not is_ordinary_context() or self._store.has_leases():
            return list(updates), []
        now: list[ChunkUpdate] = []
        later: list[ChunkUpdate] = []
        for update in updates:
            (later if update.can_wait() else now).append(update)
        return now, later

    def _in_order_of_next_use(self, updates: list[ChunkUpdate]) -> list[ChunkUpdate]:
        order = self._store.trace.first_use_order()
        return sorted(updates, key=lambda u: (order.get(u.chunk.key, len(order)), u.chunk.key))

    def begin_own_step(self) -> None:
        """Before an optimizer runs its own step on the gradients there are."""
        if self._manager.reduction is not None:
            self._manager.reduction.refuse_unreduced()

    def end_own_step(self) -> None:
        """After an optimizer ran its own step on whole values."""
        if self._manager.ranks is not None:
            self._manager.ranks.forget_changes()
            self._manager.ranks.end_step()

    # -- putting off ------------------------------------------------------------------------------

    def _put_off_all(self, recipe: Recipe, updates: Sequence[ChunkUpdate]) -> None:
        targets = [target for update in updates for target in update.targets]
        if not targets:
            return
        with plain_torch():
            count_ahead(recipe, targets)
            # Autograd has to see the change now, in graphs made before the step.
            parameters = [t.home.parameter for t in targets if t.home.parameter is not None]
            torch.autograd.graph.increment_version(parameters)
        for update in updates:
            self._wait_for_use(update)

    def _wait_for_use(self, update: ChunkUpdate) -> None:
        def do_it() -> None:
            self._finish(update)

        with self._store.lock:
            self._put_off[update.chunk.key] = update
            for chunk in update.chunks():
                chunk.before_use = do_it

    def _finish(self, update: ChunkUpdate) -> None:
        with self._store.lock:
            if self._put_off.pop(update.chunk.key, None) is None:
                return  # another thread was faster
            for chunk in update.chunks():
                chunk.before_use = None
            try:
                with ordinary_context():
                    update.run()
            except BaseException:
                self._wait_for_use(update)  # the next use tries again
                raise
            self._end_stopped()

    def finish_put_off(self) -> None:
        """Carry out what still waits."""
        for update in self._in_order_of_next_use(list(self._put_off.values())):
            self._finish(update)

    def finish_or_give_up(self) -> None:
        """At the end: what cannot be carried out leaves values that are neither old nor new."""
        if self.before_close is not None:
            self.before_close()
        for update in list(self._put_off.values()):
            try:
                self._finish(update)
            except Exception as error:
                update.give_up(error)
        self._put_off.clear()

    # -- optimizer.state --------------------------------------------------------------------------

    def _entry(self, home: Home) -> State:
        """`optimizer.state[p]`, or what will become it when this step is over."""
        p = home.parameter
        assert p is not None
        if p in self.optimizer.state:
            return self.optimizer.state[p]  # type: ignore[no-any-return]
        return self._entries.setdefault(p, {})

    def _publish_entries(self) -> None:
        """New entries appear in the order of the parameters, as if torch had made them."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if self._entries.get(p):
                    self.optimizer.state[p] = self._entries[p]
        self._entries = {}

    def agree_with_ranks(self) -> None:
        """At init: each rank will keep a part of what must be one state."""
        if self._manager.ranks is None:
            return
        kind = type(self.optimizer).__name__
        self._manager.ranks.agree_on_state(digest_of_state(self.optimizer), kind)

    def take_in_states(self) -> None:
        """After an optimizer ran its own step: page the state it created."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                home = self._manager.home(p)
                if home is not None and p in self.optimizer.state:
                    self.states.take_in_all(home, self.optimizer.state[p])
        for chunk in self.states.known_chunks():
            self.states.offer_to_ranks(chunk)
