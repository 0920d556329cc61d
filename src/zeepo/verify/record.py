"""What a run showed, and how two runs differ.

A `Record` holds every observation of a program (losses, norms, values read) and a snapshot of
models and optimizers, each reduced to a `Value`. `compare` names the first difference in the order
in which things happened. Nothing here knows a session or pytest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zeepo.verify.values import Value, how_different, values_of


def snapshot(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Value]:
    """Everything a user can read of the models and optimizers after training."""
    values: dict[str, Value] = {}
    names: dict[int, str] = {}
    for number, model in enumerate(models):
        root = f"model{number}"
        values.update(values_of(root, model.state_dict(), stride=True))
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{root}.{name}")
            values.update(values_of(f"{root}.{name}.requires_grad", parameter.requires_grad))
            values.update(values_of(f"{root}.{name}.grad", parameter.grad))
    for number, optimizer in enumerate(optimizers):
        root = f"optimizer{number}"
        values.update(values_of(root, optimizer.state_dict()))
        for index, group in enumerate(optimizer.param_groups):
            owners = [names.get(id(parameter), "not in a model") for parameter in group["params"]]
            values.update(values_of(f"{root}.group{index}.owners", owners))
    return values


def ordinary_problems(models: Sequence[nn.Module], phase: str) -> list[str]:
    """What is not an ordinary tensor in models that no session holds any more."""
    problems = []
    for model in models:
        for name, parameter in model.named_parameters():
            if type(parameter) is not nn.Parameter:
                problems.append(f"{phase}: {name} is a {type(parameter).__name__}")
            if parameter.grad is not None and type(parameter.grad) is not torch.Tensor:
                problems.append(f"{phase}: {name}.grad is a {type(parameter.grad).__name__}")
        for name, buffer in model.named_buffers():
            if type(buffer) is not torch.Tensor:
                problems.append(f"{phase}: buffer {name} is a {type(buffer).__name__}")
    return problems


@dataclass
class Record:
    """What one run of a program showed, in order."""

    observations: list[tuple[str, Value]] = field(default_factory=list)
    before_close: list[dict[str, Value]] = field(default_factory=list)
    after_close: list[dict[str, Value]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: set[str] = field(default_factory=set)
    num_units: int = 0
    stats: dict[str, Any] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def observe(self, name: str, item: Any) -> None:
        """Keep a copy of an observation; the n-th of a name is called `name[n]`."""
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        self.observations.extend(values_of(f"{name}[{number}]", item))


@dataclass(frozen=True)
class Difference:
    """The first thing in which two runs differ."""

    phase: str
    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.phase}: {self.name}: {self.detail}"


def _first(
    phase: str, expected: Iterable[tuple[str, Value]], actual: Iterable[tuple[str, Value]]
) -> Difference | None:
    """The first difference between two named sets of values, in the order of the expected ones."""
    left, right = dict(expected), dict(actual)
    for name, value in left.items():
        got = right.get(name)
        detail = "is missing" if got is None else how_different(value, got)
        if detail is not None:
            return Difference(phase, name, detail)
    for name in right:
        if name not in left:
            return Difference(phase, name, "was not expected")
    return None


def compare(expected: Record, actual: Record) -> list[Difference]:
    """The first difference of each phase, in the order the phases happened."""
    found = [_first("during training", expected.observations, actual.observations)]
    for phase, left, right in (
        ("before close", expected.before_close, actual.before_close),
        ("after close", expected.after_close, actual.after_close),
    ):
        if len(left) != len(right):
            found.append(Difference(phase, "sessions", f"{len(left)} against {len(right)}"))
        found.extend(_first(phase, a.items(), b.items()) for a, b in zip(left, right, strict=False))
    return [difference for difference in found if difference is not None]


@dataclass
class Report:
    """The verdict on one program under one placement."""

    program: str
    placement: str
    differences: list[Difference]
    problems: list[str]
    stats: dict[str, Any] = field(default_factory=dict)
    num_units: int = 0
    ram_bytes: int = 0
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every bit was equal and the engine did what it was asked to do."""
        return not self.differences and not self.problems

    def __str__(self) -> str:
        verdict = "PASS" if self.passed else "FAIL"
        head = f"{verdict} {self.program} [{self.placement}] {self.num_units} units"
        lines = [f"{head}, {self.ram_bytes} bytes of ram, {self.seconds:.2f} s"]
        lines += [f"  differs {difference}" for difference in self.differences]
        lines += [f"  problem {problem}" for problem in self.problems]
        return "\n".join(lines)
