"""The RAM of one session: planned at init, foretold with the first batch, followed, resized.

The plan in force is here, and so is the budget that follows the process ([memory/budget]). What a
session needs is known in two stages: at init, from the model alone; and just before the first
forward, from a run on shapes with the user's batch. Each time a budget that cannot be enough is
refused with the bill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zeepo.chunks.store import ChunkStore
from zeepo.config import Options
from zeepo.engine.activations import Activations
from zeepo.engine.adoption import bytes_of_model, plan_session
from zeepo.engine.estimate import FirstForward, estimate
from zeepo.engine.manager import Manager
from zeepo.engine.regions import is_compiled
from zeepo.engine.team import Team
from zeepo.engine.tuning import tuning
from zeepo.errors import BudgetError, DiskError
from zeepo.memory.budget import RamBudget
from zeepo.planner.machine import (
    own_cgroup_limit,
    peak_resident_growth_bytes,
    resident_growth_bytes,
    spare_bytes,
)
from zeepo.planner.plan import TORCH_GROWTH_BYTES, Plan
from zeepo.planner.pressure import ReclaimRequests
from zeepo.planner.units import Unit
from zeepo.units import enough_bytes, format_bytes

NO_DISK_HINT = ' Give disk="/a/folder": what does not fit can then rest there.'
CHILD_BYTES = 128 << 20
"""What a child that runs the model on shapes may take."""


class Allowance:
    """What a session may take, and what it needs."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        units: Sequence[Unit],
        options: Options,
        team: Team,
    ):
        self.plan = plan_session(models, optimizers, units, options, team)
        self._has_disk = bool(options.disk)
        refuse_too_little(self.plan, has_disk=self._has_disk)
        check_disk_limit(self.plan, options)
        self._excluded_bytes = self._find_excluded_bytes(models, optimizers)
        self._refuse_what_the_system_lacks()
        self._store: ChunkStore | None = None
        self._requests: ReclaimRequests | None = None
        self._first_forward: FirstForward | None = None

    def _find_excluded_bytes(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> int:
        """What the process held before the session, beside the model, and `ram` has no room for.

        Counted as far as it fits: a budget that could not be met by any means would be of no use.
        """
        held = resident_growth_bytes() - bytes_of_model(models, optimizers)
        beside_torch = held - TORCH_GROWTH_BYTES
        return max(0, beside_torch + self.plan.minimum_ram - self.plan.ram)

    def growth_bytes(self) -> int:
        """How much the process has grown, as `ram` counts it."""
        return resident_growth_bytes() - self._excluded_bytes

    def _refuse_what_the_system_lacks(self) -> None:
        """BudgetError now, rather than killed later, if there is less than the least that works."""
        spare = spare_bytes()
        if spare is None or not tuning().refuse_lack:
            return
        allowed = self.growth_bytes() + spare
        if allowed < self.plan.minimum_ram:
            raise BudgetError(
                f"the machine, or the memory cgroup this process is in, leaves "
                f"{format_bytes(max(0, allowed))}, whatever ram says: this session needs "
                f"{format_bytes(self.plan.minimum_ram)}. Raise the cgroup's limit, or end what "
                f"else uses its memory.\n{self.plan.explain()}"
            )

    # -- following --------------------------------------------------------------------------------

    def follow(self, store: ChunkStore, activations: Activations | None) -> None:
        """From now on the ledger's limit goes with the process's growth."""
        self._store = store
        requests = self._requests = ReclaimRequests()
        budget = store.moves.budget = RamBudget(
            store.pool,
            self.plan.ram,
            self.plan.reserve,
            self.plan.floor_bytes,
            self.growth_bytes,
            store.moves.movable_bytes,
            lambda growth: requests.spare_bytes(growth, spare_bytes),
            lambda: peak_resident_growth_bytes() - self._excluded_bytes,
            own_cgroup_limit(),
        )
        budget.let_spares_go = store.moves.spares.let_go
        if activations is not None:
            budget.spill = activations.spill

    def close(self) -> None:
        self.stop_watching()
        if self._requests is not None:
            self._requests.close()

    def end_step(self) -> None:
        if self._store is not None and self._store.budget is not None:
            self._store.budget.end_step()

    def resize(self, ram_bytes: int) -> None:
        """Another budget from now on; what no longer fits leaves before this returns."""
        plan = replace(self.plan, ram=ram_bytes)
        refuse_too_little(plan, has_disk=self._has_disk)
        if self._store is None or self._store.budget is None:
            raise BudgetError(
                "session.resize needs a disk: without one nothing can leave RAM, and nothing would "
                "be gained by a larger budget. Open the session with disk=."
            )
        self.plan = plan
        self._store.budget.resize(ram_bytes)
        self._store.look_at_budget()

    # -- the first batch --------------------------------------------------------------------------

    def watch_first_forward(
        self, models: Sequence[nn.Module], manager: Manager, tell: Callable[[Plan], None]
    ) -> None:
        """Find out what a step will need when the first batch comes, and `tell` the new plan."""
        modules = [module for model in models for module in model.modules()]
        if tuning().estimate and not any(map(is_compiled, modules)):

            def act(model: nn.Module, args: Any, kwargs: Any) -> None:
                manager.store.check_process()
                self._plan_for_batch(manager, model, args, kwargs)
                tell(self.plan)
                refuse_too_little(self.plan, has_disk=self._has_disk)
                self._refuse_what_the_system_lacks()

            self._first_forward = FirstForward(models, act)

    def stop_watching(self) -> None:
        """A compiler looks at how modules are called: nothing of ours may be there."""
        if self._first_forward is not None:
            self._first_forward.stop()

    def _plan_for_batch(
        self, manager: Manager, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Before the first forward: find out what it will need."""
        chunk_of = {number: home.chunk.key for number, home in manager.homes.items()}
        chunks = {home.chunk.key: home.chunk for home in manager.homes.values()}
        comes = not self.plan.has_whole_params
        sizes = {key: chunk.layout.nbytes if comes else 0 for key, chunk in chunks.items()}
        names = {key: chunk.label for key, chunk in chunks.items()}
        manager.store.expect(CHILD_BYTES)
        spills = self.plan.activations == "disk"
        smallest = tuning().smallest_activation_bytes
        found = estimate(
            model, args, kwargs, chunk_of, sizes, names, spills=spills, smallest_bytes=smallest
        )
        if isinstance(found, str):
            self.plan = replace(self.plan, unknown_because=found)
            return
        known = self.plan.footprint
        was_refused = self.plan.ram < self.plan.minimum_ram  # then that batch was not computed
        if known is None or was_refused or known.peak_bytes < found.peak_bytes:
            self.plan = replace(self.plan, footprint=found)
        if manager.store.budget is not None:
            manager.store.budget.prepare_for(found.rise_bytes, found.most_torch_bytes)


def refuse_too_little(plan: Plan, *, has_disk: bool) -> None:
    """BudgetError with the bill, if the budget is below the least that works."""
    if plan.ram < plan.minimum_ram:
        missing = format_bytes(plan.minimum_ram - plan.ram)
        raise BudgetError(
            f"ram={format_bytes(plan.ram)} is too little by {missing}: this session needs "
            f'ram="{enough_bytes(plan.minimum_ram)}" ({plan.minimum_ram} bytes).'
            f"{'' if has_disk else NO_DISK_HINT}\n{plan.explain()}"
        )


def check_disk_limit(plan: Plan, options: Options) -> None:
    """Refuse now what would fail in the middle of the first steps."""
    kept = plan.managed_bytes - plan.staging_bytes
    if options.disk_limit is not None and options.disk_limit < plan.disk_bytes - kept:
        raise DiskError(
            f"disk_limit={format_bytes(options.disk_limit)} is too little: what rests on disk "
            f"is up to {format_bytes(plan.disk_bytes)}, and ram keeps at most "
            f"{format_bytes(kept)} of it. Give "
            f'disk_limit="{enough_bytes(plan.disk_bytes)}", or more ram.'
        )
