"""The plan: what must be in RAM at once, what stays there, and the least budget that works. Pure.

The least budget has two parts. The managed part is the ledger's: the largest working set of one function
(its chunks), of a backward node that recomputes others, and of one piece of an update. The reserve is what
torch itself needs beside it; until activations are measured it is an estimate without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """Largest module that has to be whole while it runs (compiled, or one of torch's fast paths)."""
    bill: dict[str, int] = field(default_factory=dict)

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
        return TORCH_GROWTH_BYTES + 2 * largest

    @property
    def minimum_ram(self) -> int:
        """The least `ram` with which this session runs, bytes."""
        return self.reserve + self.managed_minimum

    @property
    def managed_bytes(self) -> int:
        """What the ledger may hold under the budget in force."""
        return self.ram - self.reserve

    def items(self) -> dict[str, int]:
        """The bill of the managed part: what must be in RAM at the worst moment, by tag."""
        params = [_page(u.param_bytes) for u in self.units]
        grads = [_page(u.trainable_bytes) for u in self.units]
        pieces = [min(g, _page(self.piece_bytes)) for g in grads]
        states = max((piece * self.num_states for piece in pieces), default=0)
        items: dict[str, int] = {}
        in_ram = {kind: where == "ram" for kind, where in self.placement.items()}
        items["params"] = sum(params) if in_ram["params"] else 2 * max(params, default=0)
        items["grads"] = sum(grads) if in_ram["grads"] else 2 * max(grads, default=0)
        if in_ram["optimizer_state"]:
            items["optimizer state"] = sum(grads) * self.num_states
        else:
            items["optimizer state"] = 2 * states
        if self.region_bytes and not in_ram["params"]:
            items["params"] += _page(self.region_bytes)
        if any(where == "disk" for where in self.placement.values()):
            items["disk staging"] = self.staging_bytes
        return items

    def explain(self) -> str:
        """The bill, as text."""
        lines = [f"{self.num_units} units, budget {format_bytes(self.ram)}"]
        for kind, where in self.placement.items():
            lines.append(f"  {kind:<16} rest in {where}")
        lines.append(f"least ram: {format_bytes(self.minimum_ram)}")
        lines.append(f"  {'reserve for torch':<24} {format_bytes(self.reserve):>12}")
        for tag, nbytes in self.items().items():
            lines.append(f"  {tag:<24} {format_bytes(nbytes):>12}")
        lines.append("largest units")
        for unit in sorted(self.units, key=lambda u: -u.param_bytes)[:5]:
            lines.append(f"  {unit.name:<24} {format_bytes(unit.param_bytes):>12}")
        return "\n".join(lines)


def _page(nbytes: int) -> int:
    return align_up(nbytes, PAGE_BYTES) if nbytes else 0


def sum_bytes(units: Sequence[UnitPlan]) -> int:
    return sum(unit.param_bytes for unit in units)
