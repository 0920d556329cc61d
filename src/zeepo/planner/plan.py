"""The plan: what must be in RAM at once, what stays there, and the least budget that works. Pure.

The least budget is the sum, at the worst moment of a step, of three things: what torch itself takes
(its lazily loaded parts), what rests in RAM, and the working set of that moment. Before the first
batch is seen the working set is a lower bound made of the largest unit; with a batch, a run on
shapes ([footprint]) tells the real one, and the plan is made anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from zeepo.chunks.layout import align_up
from zeepo.units import MiB, format_bytes

PAGE_BYTES = 4096
CUT_BYTES = 64
"""A part may be larger than its share by so much: cuts lie at multiples of it."""
TORCH_GROWTH_BYTES = 82 * MiB
"""What torch's lazily loaded parts take after import (measured after four steps of models of a few
KiB: linear layers 78 to 82 MiB, a GPT 89, an LSTM 91, convolutions 92, for which the slack has to
do)."""
ACTIVATION_BYTES = 16 * MiB
"""For activations and temporaries as long as no batch was seen, and never less."""
TOLERATED_BYTES = 48 * MiB
"""A batch that needs so much more than was set aside does not change the least budget: what was
accepted for the model alone would be refused for a trifle."""
LARGE_BYTES = 32 * MiB
"""Gradients up to this size are copied into buffers: for a moment they are there twice.

Nor is a unit of a larger one ever recomputed beside another of its size, as far as we know."""
SLACK_SHARE = 0.07
"""What the allocator loses and what grows between two looks (measured: 2 to 14 %)."""
IN_MOTION_BYTES = 20 * MiB
"""Activations on their way to and from disk."""


@dataclass(frozen=True)
class Footprint:
    """What one forward and backward needs beside what rests in RAM, bytes."""

    peak_bytes: int
    """At the worst moment: chunks that are leased and what torch holds."""
    leased_bytes: int
    """Of that: chunks."""
    torch_bytes: int
    """Of that: activations, temporaries, gradients that are being made."""
    saved_bytes: int
    """What autograd saves for backward, all of it."""
    rise_bytes: int
    """The most that torch takes between two looks at the budget."""
    moment: str
    """The function and the parameters of the worst moment."""
    kept_bytes: int = 0
    """Of what is saved, what cannot go to disk: too small, or nothing may."""
    most_torch_bytes: int = 0
    """The most that torch holds at once, at whatever moment."""


@dataclass(frozen=True)
class UnitPlan:
    """One unit as the planner sees it."""

    name: str
    param_bytes: int
    trainable_bytes: int
    largest_parameter_bytes: int


@dataclass(frozen=True)
class Plan:
    """What was decided for a session; does not change."""

    units: tuple[UnitPlan, ...]
    num_states: float
    """The optimizer's states of a parameter, in multiples of the parameter's size."""
    placement: dict[str, str]
    """Kind ("params", "grads", "optimizer_state") -> lowest tier."""
    ram: int
    """The budget in force, bytes."""
    staging_bytes: int
    piece_bytes: int
    region_bytes: int = 0
    """Largest module that has to be whole while it runs (compiled, or a fast path of torch's)."""
    num_temporaries: int = 0
    """Tensors of a piece's size that the optimizer makes and drops while it updates."""
    largest_state: float = 1.0
    """The largest of the states, in the same measure."""
    activations: str = "ram"
    """Where what autograd saves may go: "ram", "disk" or "recompute"."""
    num_ranks: int = 1
    share: float = 1.0
    """Of what is split over the ranks, this rank's part."""
    stage: int = 0
    """What is split over the ranks: from 1 optimizer state, from 3 parameters."""
    footprint: Footprint | None = None
    """What a forward and backward needs, once a batch was seen."""
    unknown_because: str = ""
    """Why the footprint could not be told, if that was tried."""

    @property
    def num_units(self) -> int:
        return len(self.units)

    @property
    def uses_disk(self) -> bool:
        """Whether anything may go to disk."""
        return "disk" in (*self.placement.values(), self.activations)

    @property
    def has_whole_params(self) -> bool:
        """Whether parameters are whole in RAM all the time, and nothing has to come for them."""
        is_split = self.stage >= 3 and self.num_ranks > 1
        return self.placement["params"] == "ram" and not is_split

    @property
    def _has_staging(self) -> bool:
        return self.uses_disk or self.num_ranks > 1

    @property
    def minimum_ram(self) -> int:
        """The least `ram` with which this session runs, bytes."""
        return sum(self.items().values())

    @property
    def reserve(self) -> int:
        """Never the ledger's: torch's own growth, the least for activations, and slack."""
        return TORCH_GROWTH_BYTES + ACTIVATION_BYTES + self.items()["slack"]

    @property
    def managed_bytes(self) -> int:
        """The most the ledger may hold under the budget in force."""
        return self.ram - self.reserve

    @property
    def guaranteed_bytes(self) -> int:
        """What the ledger may always hold: enough for whatever a single function can ask for.

        A node's chunk, one that it recomputes and a gradient; or a chunk's update. Rarely needed at
        a moment when activations are many, so not part of the least budget.
        """
        in_ram = self._in_ram()
        resting = sum(self._resting(in_ram).values())
        params = sorted((_page(u.param_bytes) for u in self.units), reverse=True)
        working = max(sum(params[:2]), _page(self.region_bytes))
        working = 0 if self.has_whole_params else working
        gradient = 0 if in_ram["grads"] else max(params, default=0)
        update = self._updating(in_ram)
        updating = sum(update.values()) - update.get("activations", 0)
        staging = self.staging_bytes if self._has_staging else 0
        return resting + max(working + gradient, updating) + staging

    @property
    def floor_bytes(self) -> int:
        """What the ledger keeps at any time, however much torch takes."""
        small = min(self.guaranteed_bytes, self.staging_bytes + ACTIVATION_BYTES)
        return max(0, min(small, self.managed_bytes))

    @property
    def disk_bytes(self) -> int:
        """What can be on disk at once, of this rank, when nothing of it is in RAM."""
        sizes = self._resting(dict.fromkeys(self.placement, True))
        tags = {"params": "params", "grads": "grads", "optimizer_state": "optimizer state"}
        return sum(sizes[tags[kind]] for kind, tier in self.placement.items() if tier == "disk")

    def items(self) -> dict[str, int]:
        """The bill: what must be in RAM at the worst moment, by tag."""
        in_ram = self._in_ram()
        resting = self._resting(in_ram)
        busiest = self._busiest(in_ram)
        items = {"torch itself": TORCH_GROWTH_BYTES}
        items |= {tag: resting.get(tag, 0) + busiest.get(tag, 0) for tag in resting | busiest}
        if self._has_staging:
            items["staging"] = self.staging_bytes
        items["slack"] = int(SLACK_SHARE * sum(items.values()))
        return items

    def moment(self) -> str:
        """When the worst moment is."""
        in_ram = self._in_ram()
        if self._busiest(in_ram) == self._updating(in_ram):
            return "the update of the largest unit"
        return self.footprint.moment if self.footprint else "backward of the largest unit"

    def _in_ram(self) -> dict[str, bool]:
        return {kind: where == "ram" for kind, where in self.placement.items()}

    def _busiest(self, in_ram: dict[str, bool]) -> dict[str, int]:
        computing, updating = self._computing(in_ram), self._updating(in_ram)
        return max((computing, updating), key=lambda items: sum(items.values()))

    def _resting(self, in_ram: dict[str, bool]) -> dict[str, int]:
        """What is kept in RAM all the time."""
        of_params = self.share if self.stage >= 3 else 1.0
        of_states = self.share if self.stage >= 1 else 1.0
        params = sum(_part(u.param_bytes, of_params) for u in self.units)
        # Gradients leave for their owners while backward runs, but ranks need not go the same way.
        grads = sum(_page(u.trainable_bytes) for u in self.units)
        states = sum(_part(u.trainable_bytes, of_states) for u in self.units) * self.num_states
        return {
            "params": params if in_ram["params"] else 0,
            "grads": grads if in_ram["grads"] else 0,
            "optimizer state": ceil(states) if in_ram["optimizer_state"] else 0,
        }

    def _computing(self, in_ram: dict[str, bool]) -> dict[str, int]:
        """Forward and backward: a function's chunks, a gradient that is being made, activations.

        Frozen units count as if they trained: they may be unfrozen later.
        """
        params = sorted((_page(u.param_bytes) for u in self.units), reverse=True)
        largest = max(params, default=0)
        of_largest = [u for u in self.units if _page(u.param_bytes) == largest]
        is_small = all(u.largest_parameter_bytes <= LARGE_BYTES for u in of_largest)
        working = max(sum(params[:2]) if is_small else largest, _page(self.region_bytes))
        items = {
            "params": 0 if self.has_whole_params else working,
            "grads": 0 if in_ram["grads"] else largest,
            "activations": max(ACTIVATION_BYTES, largest if is_small else 0),
        }
        if self.footprint is not None:
            moving = self.footprint.saved_bytes if self.activations == "disk" else 0
            in_motion = min(IN_MOTION_BYTES, moving)
            real = {
                "params": self.footprint.leased_bytes,
                "grads": 0,
                "activations": self.footprint.torch_bytes + in_motion,
            }
            if sum(real.values()) > sum(items.values()) + TOLERATED_BYTES:
                items = real
        return items

    def _updating(self, in_ram: dict[str, bool]) -> dict[str, int]:
        """The step: one chunk's parameters and gradients, and a piece of its states.

        The first step makes the states, and each is there twice for a moment when it moves into its
        slot. A later one is done by the next forward, when small activations are there that stay in
        RAM.
        """
        largest: dict[str, int] = {}
        kept = self.footprint.kept_bytes if self.footprint and self.activations == "disk" else 0
        for unit in self.units:
            grads = _page(unit.param_bytes)
            piece = min(grads, _page(self.piece_bytes))
            moving = ceil(piece * self.largest_state) if self.num_states else 0
            beside = max(moving, kept) + piece * self.num_temporaries
            items = {
                "params": 0 if in_ram["params"] else _page(unit.param_bytes),
                "grads": 0 if in_ram["grads"] else grads,
                "optimizer state": 0
                if in_ram["optimizer_state"]
                else ceil(piece * self.num_states),
                "activations": max(ACTIVATION_BYTES, beside),
            }
            largest = max(largest, items, key=lambda item: sum(item.values()))
        return largest

    def explain(self) -> str:
        """The bill, as text."""
        lines = [f"{self.num_units} units, budget {format_bytes(self.ram)}"]
        if self.num_ranks > 1:
            lines.append(
                f"  one of {self.num_ranks} ranks, stage {self.stage}, "
                f"{self.share:.0%} of what is split"
            )
        for kind, where in self.placement.items():
            lines.append(f"  {kind:<16} rest {'on' if where == 'disk' else 'in'} {where}")
        lines.append(f"  {'activations':<16} {self._explain_activations()}")
        lines.append(f"least ram: {format_bytes(self.minimum_ram)}, needed at the same time,")
        lines.append(f"in {self.moment()}:")
        names = {"activations": "activations, temporaries"}  # an update has only the latter
        for tag, nbytes in self.items().items():
            if nbytes:
                lines.append(f"  {names.get(tag, tag):<24} {format_bytes(nbytes):>12}")
        lines.append("largest units")
        for unit in sorted(self.units, key=lambda u: -u.param_bytes)[:5]:
            lines.append(f"  {unit.name:<24} {format_bytes(unit.param_bytes):>12}")
        if self.items()["activations"] > self.minimum_ram // 2 and self.activations != "recompute":
            lines.append('most of it are activations: activations="recompute" may need less')
        return "\n".join(lines)

    def _explain_activations(self) -> str:
        where = {"disk": "go to disk when RAM is short", "recompute": "are computed again"}
        text = where.get(self.activations, "stay in ram")
        if self.footprint is not None:
            return f"{text}; {format_bytes(self.footprint.saved_bytes)} saved with this batch"
        if self.unknown_because:
            return f"{text}; how many cannot be told beforehand ({self.unknown_because})"
        return f"{text}; how many is told by the first batch"


def _part(nbytes: int, share: float) -> int:
    """A rank's part, in pages."""
    return _page(nbytes if share == 1.0 else min(nbytes, int(nbytes * share) + CUT_BYTES))


def rank_buffers(
    unit_bytes: int, num_ranks: int, share: float, num_asked: int, *, uses_disk: bool
) -> int:
    """What a rank needs for the others: `num_asked` times what everybody has for its part of a unit
    that is being added, and a unit that is read for them from disk."""
    if num_ranks == 1:
        return 0
    read_bytes = _page(unit_bytes) if uses_disk else 0
    return read_bytes + num_asked * num_ranks * _part(unit_bytes, share)


def _page(nbytes: int) -> int:
    return align_up(nbytes, PAGE_BYTES) if nbytes else 0
