"""A session: the user's model and optimizer under management, from `init` to `close`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from zeepo.chunks.layout import pack
from zeepo.chunks.losses import loss_message
from zeepo.chunks.store import Chunk, ChunkStore
from zeepo.chunks.wholes import drop_parts
from zeepo.config import Options, resolve_options
from zeepo.engine.activations import Activations
from zeepo.engine.adoption import (
    adopt_units,
    choose_units,
    home_tiers,
    make_leftovers_ordinary,
    refuse_unmanageable,
)
from zeepo.engine.allowance import Allowance
from zeepo.engine.backward_updates import BackwardUpdates
from zeepo.engine.closing import Closing
from zeepo.engine.ends_of_backward import EndsOfBackward
from zeepo.engine.intercept_step import StepInterception
from zeepo.engine.interrupts import Interrupts
from zeepo.engine.layer_major import run_layer_major
from zeepo.engine.lazy import with_ram_of_lazy
from zeepo.engine.legacies import exchange_legacies
from zeepo.engine.manager import Manager
from zeepo.engine.ranks import Ranks
from zeepo.engine.recompute import Recompute
from zeepo.engine.regions import Regions
from zeepo.engine.samples import Samples
from zeepo.engine.shared_loss import share_loss
from zeepo.engine.stats import Stats, collect_stats
from zeepo.engine.step import OptimizerStep
from zeepo.engine.team import Team, join_team
from zeepo.engine.telemetry import Telemetry
from zeepo.engine.tuning import tuning
from zeepo.errors import (
    ConfigError,
    CorruptionError,
    DiskError,
    SessionError,
    UnsupportedError,
)
from zeepo.launch import launching
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.ledger import Ledger
from zeepo.memory.pool import BufferPool
from zeepo.memory.reclaimable import ReclaimableSpace
from zeepo.planner.plan import Plan
from zeepo.planner.units import Unit


class Session:
    """Open from `zeepo.init` until `close`; a context manager."""

    exporter: ClassVar[Callable[[Sequence[nn.Module], str | Path, int | str], None]]
    """Writes models as safetensors; `zeepo/__init__.py` puts it here, since it is not engine's."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], options: Options
    ):
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._closed = False
        self._telemetry = Telemetry(options)
        self._interrupts = Interrupts()
        try:
            self._open(with_ram_of_lazy(options, self._models))
        except BaseException:
            self._telemetry.stop()
            self._interrupts.remove()
            raise
        self._telemetry.opened(self.plan, self._store, self._pool, self._disk, self._ranks)

    # -- setting up -------------------------------------------------------------------------------

    def _open(self, options: Options) -> None:
        """Plan, refuse what cannot be, take everything over; on failure nothing is changed."""
        refuse_unmanageable(self._models, self._optimizers)
        team = join_team(options.ram)
        units = choose_units(self._models, self._optimizers, options, team)
        self._allowance = Allowance(self._models, self._optimizers, units, options, team)
        self._ledger = Ledger("ram", self.plan.managed_bytes)
        self._pool = BufferPool(self._ledger)
        self._disk: DiskTier | None = None
        if options.disk and self.plan.uses_disk:
            self._disk = DiskTier(options.disk, options.disk_limit, pool=self._pool)
        space = None if self._disk is None else ReclaimableSpace(self._disk)
        self._store = ChunkStore(
            self._pool,
            prefetch=tuning().prefetch,
            guaranteed_bytes=self.plan.guaranteed_bytes,
        )
        self._manager = Manager(self._store, home_tiers(self.plan, self._disk))
        self._ranks = self._join_ranks(units, team)
        self._closing = Closing(self._store, space)
        if space is not None:
            self._manager.copies.use_disk(space, self.plan.guaranteed_bytes)
        self._late_names = (f"late{number}" for number in itertools.count())
        self._steps: list[OptimizerStep] = []
        self._interceptions: list[StepInterception] = []
        self._backward_updates: BackwardUpdates | None = None
        self._activations = self._make_activations(options)
        if self._disk is not None:
            self._allowance.follow(self._store, self._activations)
        self._regions = Regions(self._manager, self._activations, self._allowance.stop_watching)
        self._recompute = Recompute()
        try:
            adopt_units(self._manager, units)
            if self._ranks is not None:
                self._ends_of_backward.install()
                self._samples.watch(self._models, counts=options.weigh_samples)
            for optimizer in self._optimizers:
                self._take_optimizer(optimizer)
            if options.update == "backward":
                self._backward_updates = BackwardUpdates(self._manager, self._steps)
                self._backward_updates.install()
            self._regions.install(self._models)
            if options.activations == "recompute":
                self._recompute.install(self._models)
            if self._activations is not None:
                self._activations.install()
            self._allowance.watch_first_forward(
                self._models, self._manager, self._telemetry.planned
            )
        except BaseException:
            with contextlib.suppress(DiskError):  # the first error is the one to tell
                self._give_everything_back()
            raise

    def _join_ranks(self, units: Sequence[Unit], team: Team) -> Ranks | None:
        """With several ranks, what each of them does is agreed with the others."""
        self._ends_of_backward = EndsOfBackward(self._before_backward, self._after_backward)
        self._samples = Samples()
        if team.num_ranks == 1:
            return None
        ranks = Ranks(self._store, self.plan.stage, home_tiers(self.plan, self._disk), team)
        ranks.network.at_good_end = self.close if launching.slices is not None else None
        ranks.agree_on_model([named for unit in units for named in unit.parameters])
        exchange_legacies(ranks.network, self._disk)
        sizes = [[(n, p.nbytes) for n, p in unit.parameters] for unit in units]
        ranks.take_staging(max((pack(size).nbytes for size in sizes), default=1))
        self._manager.use_ranks(ranks, self._samples.take, self._samples.first_batch)
        return ranks

    def _before_backward(self) -> None:
        assert self._manager.reduction is not None
        self._manager.raw_leases.settle()
        self._manager.reduction.begin_backward()

    def _after_backward(self, roots: Sequence[Tensor] = ()) -> None:
        assert self._ranks is not None
        assert self._manager.reduction is not None
        if not self._ranks.is_local:
            self._manager.gradients.reduce(self._manager.slots)
            self._manager.raw_leases.look_again()
            share_loss(self._ranks, self._manager.reduction, roots)

    def _make_activations(self, options: Options) -> Activations | None:
        if self._disk is None or options.activations not in ("auto", "disk"):
            return None
        return Activations(
            self._manager,
            self._disk,
            tuning(),
            is_eager=options.activations == "disk",
        )

    def _take_optimizer(self, optimizer: Optimizer) -> None:
        label = f"optimizer{len(self._steps)}" if len(self._optimizers) > 1 else "optimizer"
        step = OptimizerStep(self._manager, optimizer, label, tuning(), self._adopt_late)
        self._steps.append(step)
        step.agree_with_ranks()
        step.take_in_states()
        self._interceptions.append(StepInterception(step, self._after_step))

    def _adopt_late(self, parameters: Sequence[Tensor]) -> None:
        """Parameters that came after init, with add_param_group."""
        for p in (late := [p for p in parameters if self._manager.home(p) is None]):
            if type(p) is not nn.Parameter:
                raise UnsupportedError(
                    f"an optimizer got a {type(p).__name__} of shape {tuple(p.shape)} after "
                    "init: only nn.Parameter can be added while a session is open."
                )
            name = next(self._late_names)
            self._manager.adopt_chunk(name, [(name, p)])
        if late and self._ranks is not None:  # nobody has reduced the gradients they came with
            self._before_backward()
            self._after_backward()

    def _after_step(self) -> None:
        self._manager.raw_leases.end_all()
        if self._activations is not None:
            self._activations.clear_up()
        self._store.end_step()
        self._allowance.end_step()
        self._telemetry.stepped()

    # -- what the user asks -----------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What was decided; made anew when the first batch is seen and when ram is resized."""
        return self._allowance.plan

    def stats(self) -> Stats:
        """What the session holds and has moved so far."""
        self._check_open("stats")
        return collect_stats(self._store, self._pool, self._disk, self._activations, self._ranks)

    @contextlib.contextmanager
    def gathered(self, target: nn.Module | Tensor | Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Whole, resident values inside the block; what is changed in place is kept."""
        self._check_open("gathered")
        if isinstance(target, nn.Module):
            parameters: list[Tensor] = list(target.parameters())
        else:
            parameters = [target] if isinstance(target, Tensor) else list(target)
        chunks: dict[int, Chunk] = {}
        for p in parameters:
            home = self._manager.home(p)
            if home is not None:
                chunks[home.chunk.key] = home.chunk
        self._store.check_room_for(list(chunks.values()))
        for step in self._steps:  # while the block holds its leases there may be no room for them
            step.finish_put_off()
        self._store.lease(list(chunks.values()))
        try:
            yield parameters
        finally:
            self._store.release(list(chunks.values()))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are added up on each rank; the next backward outside reduces the sum.

        With update="backward": nothing is updated inside, the next backward outside does it.
        """
        self._check_open("no_sync")
        with contextlib.ExitStack() as stack:
            if self._ranks is not None:
                stack.enter_context(self._ranks.local())
            if self._backward_updates is not None:
                stack.enter_context(self._backward_updates.accumulating())
            yield

    def accumulate(self, compute_loss: Callable[..., Tensor], micro_batches: Any) -> list[Tensor]:
        """Forward and backward of all micro-batches, unit by unit; returns their losses.

        The bits of one after the other; parameters are read once for all of them (docs/how.md).
        """
        self._check_open("accumulate")
        parts = self._manager, self._recompute, self._models
        return run_layer_major(*parts, compute_loss, list(micro_batches))

    def resize(self, *, ram: int | str) -> None:
        """Another budget from now on ("2GiB" or bytes); what no longer fits leaves first."""
        self._check_open("resize")
        ram_bytes = resolve_options({"ram": ram}).ram
        if ram_bytes is None:
            raise ConfigError('session.resize needs a size: session.resize(ram="2GiB").')
        self._allowance.resize(ram_bytes)
        self._telemetry.resized(self.plan, "session.resize")

    def register(self, name: str, obj: Any) -> None:
        raise self._later("register")

    def save(self, path: str | Path) -> None:
        raise self._later("save")

    def load(self, path: str | Path) -> None:
        raise self._later("load")

    def export(self, path: str | Path, *, max_shard_bytes: int | str = "5GB") -> None:
        """Write the models' current values as safetensors, streamed (docs/start.md)."""
        self._check_open("export")
        type(self).exporter(self._models, path, max_shard_bytes)

    def _later(self, name: str) -> UnsupportedError:
        self._check_open(name)
        return UnsupportedError(
            f"session.{name} is not in this version. model.state_dict() and optimizer.state_dict() "
            "hold the true values and can be saved with torch.save."
        )

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise SessionError(
                f"session.{what}: the session is closed. Open another by zeepo.init."
            )

    # -- the end ----------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Give everything back as ordinary tensors with their current values. Twice is harmless.

        What does not fit into the budget is mapped from unlinked files on the disk. What cannot be
        read from disk any more is filled with NaN, and CorruptionError says so. DiskError when the
        disk has no room for the mappings: the session stays open, and close can be tried again.
        """
        if not self._closed:
            self._store.check_process()
            self._manager.node_leases.refuse_inside_accumulate("session.close()")
            self._closing.check()
            self._telemetry.closing()
            try:
                self._give_everything_back()
            finally:
                self._telemetry.closed()

    def _give_everything_back(self) -> None:
        self._closed = True
        failure: DiskError | None = None
        if self._ranks is not None:
            self._ranks.network.begin_closing()
        with self._interrupts.held():
            try:
                self._manager.raw_leases.end_all()
                self._closing.begin()
                self._allowance.close()
                self._recompute.remove()  # before the regions: both patch classes, this one last
                self._regions.remove()
                if self._activations is not None:
                    self._activations.remove()
                    failure = self._activations.bring_back()
                self._manager.node_leases.forget_all()
                for step in self._steps:
                    step.finish_or_give_up()
                self._manager.stop_watching()
                self._closing.settle_all()
                if self._ranks is not None:
                    self._ranks.meet_at_close("close")
                    drop_parts(self._store)
                for step in self._steps:
                    step.states.give_back()
                self._manager.give_back()
                make_leftovers_ordinary()
            finally:
                self._tear_down()
        if self._store.lost:
            raise CorruptionError(loss_message(self._store.lost)) from self._store.lost[0][1]
        failure = self._closing.failure() or failure
        if failure is not None:
            raise failure

    def _tear_down(self) -> None:
        if self._backward_updates is not None:
            self._backward_updates.remove()
            self._backward_updates = None
        for interception in self._interceptions:
            interception.remove()
        self._recompute.remove()
        self._regions.remove()
        if self._activations is not None:
            self._activations.remove()
        self._samples.stop()
        self._ends_of_backward.remove()
        if self._ranks is not None:
            self._ranks.network.answers.stop()
        self._manager.abandon()
        if self._disk is not None:  # before the goodbye: whoever is killed later leaves nothing
            self._disk.close()
        if self._ranks is not None:
            self._ranks.close()
        launching.stop_slicing()
        self._pool.trim()
        self._interrupts.remove()
        # A closed session may be remembered for long; what it trained is the user's alone.
        self._models, self._optimizers, self._steps, self._interceptions = [], [], [], []

    def __enter__(self) -> Session:
        self._check_open("__enter__")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
