"""Finding units: the modules whose parameters move together. No I/O; reads shapes only.

A unit is the largest module that is small enough and holds no list of repeated blocks; neighbours
in a larger module are one unit as far as they fit together, unless they are blocks of a list. What
a larger module owns directly is a unit of its own, or several where it is more than the limit, and
so is any parameter larger than that. A parameter belongs to the first unit that reaches it (tied
weights have one home).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

LARGEST_UNIT_BYTES = 32 << 20
"""In a small budget, and among ranks, whose budgets may differ and whose units may not..."""
LARGEST_OF_ALL_BYTES = 128 << 20
SHARE_OF_RAM = 24
"""...and in a large one so many fit into it, which leaves room for all that goes on at once. A unit
costs Python whatever its size."""
SHARE_OF_MODEL = 8
"""No unit is larger than this fraction of the model, so that there is something to move."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Unit:
    """A module's name and the parameters that move with it."""

    name: str
    parameters: tuple[tuple[str, nn.Parameter], ...]

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for _, p in self.parameters)


def _own_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _has_repeated_blocks(module: nn.Module) -> bool:
    for child in module.modules():
        if isinstance(child, _CONTAINERS):
            holders = sum(1 for c in child.children() if any(True for _ in c.parameters()))
            if holders >= 2:
                return True
    return False


def _runs(
    parameters: Iterable[tuple[str, nn.Parameter]], largest_bytes: int
) -> list[list[tuple[str, nn.Parameter]]]:
    """Parameters in order, none larger than that, as many together as fit."""
    runs: list[list[tuple[str, nn.Parameter]]] = []
    room_bytes = -1
    for name, p in parameters:
        if p.nbytes > room_bytes:
            runs.append([])
            room_bytes = largest_bytes
        runs[-1].append((name, p))
        room_bytes -= p.nbytes
    return runs


def largest_unit_bytes(ram: int | None, num_ranks: int) -> int:
    """How large a unit may be in a session with that budget."""
    if ram is None or num_ranks > 1:
        return LARGEST_UNIT_BYTES
    return max(LARGEST_UNIT_BYTES, min(ram // SHARE_OF_RAM, LARGEST_OF_ALL_BYTES))


def find_units(
    name: str,
    model: nn.Module,
    taken: set[int] | None = None,
    largest_bytes: int | None = None,
) -> list[Unit]:
    """The units of a model, in the order of its module tree."""
    seen = set() if taken is None else taken
    largest_bytes = largest_bytes or LARGEST_UNIT_BYTES
    unique = {id(p): p for p in model.parameters() if id(p) not in seen}
    limit = min(largest_bytes, max(1, _own_bytes(unique.values()) // SHARE_OF_MODEL))
    units: list[Unit] = []

    def add(unit_name: str, parameters: list[tuple[str, nn.Parameter]]) -> None:
        fresh = []
        for n, p in parameters:
            if id(p) not in seen:  # neighbours may share one
                seen.add(id(p))
                fresh.append((n, p))
        small = [item for item in fresh if item[1].nbytes <= largest_bytes]
        for number, items in enumerate(_runs(small, largest_bytes)):
            units.append(Unit(items[0][0] if number else unit_name, tuple(items)))
        units.extend(Unit(n, ((n, p),)) for n, p in fresh if p.nbytes > largest_bytes)

    def is_unit(module: nn.Module) -> bool:
        if not any(True for child in module.children() for _ in child.parameters()):
            return True
        return _own_bytes(module.parameters()) <= limit and not _has_repeated_blocks(module)

    def visit(prefix: str, module: nn.Module) -> None:
        """Of a module that is too large: what it owns itself, then what is in it."""
        add(prefix or type(module).__name__, list(module.named_parameters(prefix, recurse=False)))
        neighbours: list[tuple[str, nn.Module]] = []
        for child_name, child in module.named_children():
            path = f"{prefix}.{child_name}" if prefix else child_name
            bundled = _own_bytes(p for _, m in neighbours for p in m.parameters())
            is_full = bundled + _own_bytes(child.parameters()) > limit
            if neighbours and (is_full or isinstance(module, _CONTAINERS) or not is_unit(child)):
                bundle(neighbours)
                neighbours = []
            if is_unit(child):
                neighbours.append((path, child))
            else:
                visit(path, child)
        bundle(neighbours)

    def bundle(neighbours: list[tuple[str, nn.Module]]) -> None:
        """Neighbours in a module that fit together are one unit: few large moves, not many."""
        owners = [(path, m) for path, m in neighbours if any(True for _ in m.parameters())]
        if owners:
            label = owners[0][0] + (f"..{owners[-1][0].rsplit('.')[-1]}" if owners[1:] else "")
            add(label, [named for path, m in owners for named in m.named_parameters(path)])

    if any(True for _ in model.children()):
        visit(name, model)
    else:
        add(name or type(model).__name__, list(model.named_parameters(name)))
    return [unit for unit in units if unit.parameters]
