"""The plan: what must be in RAM at once, what stays there, and the least budget that works. Pure.

The least budget has two parts. The managed part is the ledger's: the largest working set of one
function (its chunks), of a backward node that recomputes others, and of one piece of an update.
The reserve is what torch itself needs beside it; until activations are measured it is an estimate
without them.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeepo.chunks.layout import align_up
from zeepo.units import MiB, format_bytes

PAGE_BYTES = 4096
TORCH_GROWTH_BYTES = 96 * MiB
"""What torch's lazily loaded parts take after import (measured: 84 MiB for the first optimizer)."""


@dataclass(frozen=True)
class UnitPlan:
    """One unit as the planner sees it."""

    name: str
    param_bytes: int
    trainable_bytes: int


@dataclass(frozen=True)
class Plan:
    """What was decided for a session; does not change."""

    units: tuple[UnitPlan, ...]
    num_states: int
    """Optimizer tensors of the parameter's size, for each parameter."""
    placement: dict[str, str]
    """Kind ("params", "grads", "optimizer_state") -> lowest tier."""
    ram: int
    """The budget in force, bytes."""
    staging_bytes: int
    piece_bytes: int
    region_bytes: int = 0
    """Largest module that has to be whole while it runs (compiled, or a fast path of torch's)."""

    @property
    def num_units(self) -> int:
        return len(self.units)

    @property
    def managed_minimum(self) -> int:
        return sum(self.items().values())

    @property
    def reserve(self) -> int:
        """Left to torch: its own growth, and the largest gradient before it is taken over."""
        largest = max((u.param_bytes for u in self.units), default=0)
        return TORCH_GROWTH_BYTES + largest

    @property
    def minimum_ram(self) -> int:
        """The least `ram` with which this session runs, bytes."""
        return self.reserve + self.managed_minimum

    @property
    def managed_bytes(self) -> int:
        """What the ledger may hold under the budget in force."""
        return self.ram - self.reserve

    @property
    def disk_bytes(self) -> int:
        """What can be on disk at once when nothing of it is in RAM."""
        sizes = self._resting(dict.fromkeys(self.placement, True))
        tags = {"params": "params", "grads": "grads", "optimizer_state": "optimizer state"}
        return sum(sizes[tags[kind]] for kind, tier in self.placement.items() if tier == "disk")

    def items(self) -> dict[str, int]:
        """The bill of the managed part: what must be in RAM at the worst moment, by tag."""
        in_ram = {kind: where == "ram" for kind, where in self.placement.items()}
        resting = self._resting(in_ram)
        computing = self._computing(in_ram)
        updating = self._updating(in_ram)
        busiest = max((computing, updating), key=lambda item: sum(item.values()))
        items = {tag: resting.get(tag, 0) + busiest.get(tag, 0) for tag in resting | busiest}
        if not all(in_ram.values()):
            items["staging"] = self.staging_bytes
        return items

    def _resting(self, in_ram: dict[str, bool]) -> dict[str, int]:
        """What is kept in RAM all the time."""
        params = sum(_page(u.param_bytes) for u in self.units)
        grads = sum(_page(u.trainable_bytes) for u in self.units)
        return {
            "params": params if in_ram["params"] else 0,
            "grads": grads if in_ram["grads"] else 0,
            "optimizer state": grads * self.num_states if in_ram["optimizer_state"] else 0,
        }

    def _computing(self, in_ram: dict[str, bool]) -> dict[str, int]:
        """Forward and backward: a node's chunk, one that it recomputes, and a gradient.

        Frozen units count as if they trained: they may be unfrozen later.
        """
        params = sorted((_page(u.param_bytes) for u in self.units), reverse=True)
        grads = max((_page(u.param_bytes) for u in self.units), default=0)
        working = max(sum(params[:2]), _page(self.region_bytes))
        return {
            "params": 0 if in_ram["params"] else working,
            "grads": 0 if in_ram["grads"] else grads,
        }

    def _updating(self, in_ram: dict[str, bool]) -> dict[str, int]:
        """The step: one chunk's parameters and gradients, and a piece of its states."""
        largest: dict[str, int] = {}
        for unit in self.units:
            grads = _page(unit.param_bytes)
            piece = min(grads, _page(self.piece_bytes))
            items = {
                "params": 0 if in_ram["params"] else _page(unit.param_bytes),
                "grads": 0 if in_ram["grads"] else grads,
                "optimizer state": 0 if in_ram["optimizer_state"] else piece * self.num_states,
            }
            largest = max(largest, items, key=lambda item: sum(item.values()))
        return largest

    def explain(self) -> str:
        """The bill, as text."""
        lines = [f"{self.num_units} units, budget {format_bytes(self.ram)}"]
        for kind, where in self.placement.items():
            lines.append(f"  {kind:<16} rest {'on' if where == 'disk' else 'in'} {where}")
        lines.append(f"least ram: {format_bytes(self.minimum_ram)}, needed at the same time:")
        lines.append(f"  {'reserve for torch':<24} {format_bytes(self.reserve):>12}")
        for tag, nbytes in self.items().items():
            lines.append(f"  {tag:<24} {format_bytes(nbytes):>12}")
        lines.append("largest units")
        for unit in sorted(self.units, key=lambda u: -u.param_bytes)[:5]:
            lines.append(f"  {unit.name:<24} {format_bytes(unit.param_bytes):>12}")
        return "\n".join(lines)


def _page(nbytes: int) -> int:
    return align_up(nbytes, PAGE_BYTES) if nbytes else 0
