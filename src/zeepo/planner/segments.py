"""Finding segments: the parts of a model that are recomputed in backward. Pure.

A segment keeps its input and drops what is computed inside; backward then holds the inputs of all
segments and the inside of one. With an activation counted as 1 for each layer, a set of segments
costs

    their number  +  the layers outside of all of them  +  the layers of the largest

and of the sets that a limit on a segment's size gives, the cheapest is taken. That is a
transformer block, a few bottlenecks of a ResNet, a run of about sqrt(n) layers of a deep
`nn.Sequential`. Segments do not contain each other, the whole model is never one, and neither is a
single layer: it would save nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

SMALLEST_SEGMENT = 2
_SIZES_TRIED = 64


@dataclass(frozen=True)
class Segment:
    """A module that is recomputed whole, or a run of children of an `nn.Sequential`."""

    name: str
    owner: nn.Module
    modules: tuple[nn.Module, ...]
    """The outermost modules that run inside: the owner, or the children of the run."""

    @property
    def is_run(self) -> bool:
        return self.modules != (self.owner,)


def runs_in_order(module: nn.Module) -> bool:
    """Whether running the module is running its children one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def find_segments(
    model: nn.Module, is_left_alone: Callable[[nn.Module], bool] = lambda _: False
) -> list[Segment]:
    """The cheapest set of segments; what `is_left_alone` is neither in one nor has one inside."""
    sizes: dict[int, int] = {}
    split = {id(m) for m in model.modules() if any(map(is_left_alone, m.modules()))}
    lowest = _measure(model, sizes)
    best: list[Segment] = []
    for limit in sorted({*sizes.values(), *range(SMALLEST_SEGMENT, _SIZES_TRIED)}):
        cut = _Cut(sizes, limit, is_left_alone, split)
        cut.visit("", model, is_root=True)
        if cut.cost < lowest:
            best, lowest = cut.segments, cut.cost
    return best


def _measure(module: nn.Module, sizes: dict[int, int]) -> int:
    """About how many activations each module makes that backward needs."""
    size = sum(_measure(child, sizes) for child in module.children())
    if isinstance(module, nn.RNNBase):
        size = 4 * module.num_layers * (2 if module.bidirectional else 1)
    elif size:
        size += any(p is not None for p in module._parameters.values())
    else:
        # A layer written by the user mostly is a small formula, not one function.
        size = 1 if type(module).__module__.startswith("torch.nn.") else SMALLEST_SEGMENT
    sizes[id(module)] = size
    return size


class _Cut:
    """The outermost segments of at most `limit` layers."""

    def __init__(
        self,
        sizes: dict[int, int],
        limit: int,
        is_left_alone: Callable[[nn.Module], bool],
        split: set[int],
    ):
        self.segments: list[Segment] = []
        self._sizes = sizes
        self._limit = limit
        self._is_left_alone = is_left_alone
        self._split = split
        """Ids of modules that cannot be in one segment, because of what is inside."""
        self._seen: set[int] = set()
        self._outside = 0
        self._largest = 0

    @property
    def cost(self) -> int:
        return len(self.segments) + self._outside + self._largest

    def visit(self, name: str, module: nn.Module, *, is_root: bool = False) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        size = self._sizes[id(module)]
        if self._is_left_alone(module):
            self._outside += size
        elif not is_root and self._fits(module) and _can_be_segment(module):
            self._add(Segment(name, module, (module,)))
        elif runs_in_order(module) and len(list(module.children())) == len(module._modules):
            for run in self._runs(list(module.named_children())):
                self._visit_run(name, module, run)
        else:
            self._outside += size - sum(self._sizes[id(child)] for child in module.children())
            for child_name, child in module.named_children():
                self.visit(f"{name}.{child_name}".lstrip("."), child)

    def _visit_run(self, name: str, owner: nn.Module, run: Sequence[tuple[str, nn.Module]]) -> None:
        (first, module), (last, _) = run[0], run[-1]
        label = f"{name}.{first}".lstrip(".")
        if len(run) == 1:
            self.visit(label, module)
        else:
            self._add(Segment(f"{label}..{last}", owner, tuple(child for _, child in run)))

    def _fits(self, module: nn.Module) -> bool:
        is_whole = id(module) not in self._split
        return is_whole and SMALLEST_SEGMENT <= self._sizes[id(module)] <= self._limit

    def _add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self._seen.update(id(inner) for module in segment.modules for inner in module.modules())
        self._largest = max(self._largest, sum(self._sizes[id(m)] for m in segment.modules))

    def _runs(self, children: list[tuple[str, nn.Module]]) -> list[Sequence[tuple[str, nn.Module]]]:
        """Cut children into runs of about `limit` layers, each beginning where parameters are.

        What has none mostly works on its input in place, which then is its own run's.
        """
        starts: list[int] = []
        run_size: int | None = None
        for number, (_, child) in enumerate(children):
            size = self._sizes[id(child)]
            is_alone = size > self._limit or id(child) in self._split
            if is_alone or run_size is None:
                starts.append(number)
                run_size = None if is_alone else size
            elif run_size + size > self._limit and any(True for _ in child.parameters()):
                starts.append(number)
                run_size = size
            else:
                run_size += size
        return [children[a:b] for a, b in pairwise([*starts, len(children)])]


def _can_be_segment(module: nn.Module) -> bool:
    """Whether it is called (a list of modules is not) and computes with parameters."""
    is_called = type(module).forward is not nn.Module.forward
    return is_called and any(True for _ in module.parameters())
