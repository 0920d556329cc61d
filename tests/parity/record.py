"""What a run showed, and how two runs differ.

A `Record` holds every observation of a program (losses, norms, values read) and a snapshot of
models and optimizers, each reduced to a `Value`: type, shape and bytes. Two values are equal when
their bytes are, so a NaN equals itself and -0.0 does not equal 0.0. `compare` names the first
difference in the order in which things happened.

Nothing here knows zeepo or pytest, so that `zeepo verify` can use the same report.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Value:
    """One observed value: a tensor, a number or a name, as bytes."""

    kind: str
    shape: tuple[int, ...]
    data: bytes
    stride: tuple[int, ...] | None = None

    def elements(self) -> torch.Tensor | None:
        """The values as a flat tensor, or None if this was no tensor."""
        dtype = getattr(torch, self.kind.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype) or not self.data:
            return None
        return torch.frombuffer(bytearray(self.data), dtype=dtype)


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _tensor_values(path: str, tensor: torch.Tensor, stride: bool) -> Iterator[tuple[str, Value]]:
    copy = tensor.detach().clone()
    if type(copy) is not torch.Tensor:
        name = f"copy of type {type(copy).__name__}"
        yield path, Value(name, tuple(copy.shape), b"")
    elif copy.layout is torch.sparse_coo:
        yield f"{path}.is_coalesced", Value("bool", (), bytes([copy.is_coalesced()]))
        yield from _tensor_values(f"{path}.indices", copy._indices(), stride)
        yield from _tensor_values(f"{path}.values", copy._values(), stride)
    else:
        steps = tuple(tensor.stride()) if stride else None
        yield path, Value(str(copy.dtype), tuple(copy.shape), _tensor_bytes(copy), steps)


def values_of(path: str, item: Any, *, stride: bool = False) -> Iterator[tuple[str, Value]]:
    """Every tensor and number inside `item`, with its path."""
    if isinstance(item, torch.Tensor):
        yield from _tensor_values(path, item, stride)
    elif isinstance(item, Mapping):
        for key, part in item.items():
            yield from values_of(f"{path}.{key}", part, stride=stride)
    elif isinstance(item, list | tuple):
        for index, part in enumerate(item):
            yield from values_of(f"{path}.{index}", part, stride=stride)
    elif isinstance(item, float):
        yield path, Value("float", (), struct.pack("<d", item))
    elif item is None or isinstance(item, bool | int | str):
        yield path, Value(type(item).__name__, (), repr(item).encode())
    else:
        yield path, Value(type(item).__name__, (), b"")


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


def _detail(expected: Value, actual: Value) -> str | None:
    """How two values differ, or None."""
    if expected.kind != actual.kind:
        return f"expected {expected.kind}, got {actual.kind}"
    if expected.shape != actual.shape:
        return f"expected shape {expected.shape}, got {actual.shape}"
    if expected.stride != actual.stride:
        return f"expected stride {expected.stride}, got {actual.stride}"
    if expected.data == actual.data:
        return None
    left, right = expected.elements(), actual.elements()
    if left is None or right is None:
        return f"expected {expected.data!r}, got {actual.data!r}"
    width = left.element_size()
    unequal = [
        index
        for index in range(left.numel())
        if expected.data[index * width : (index + 1) * width]
        != actual.data[index * width : (index + 1) * width]
    ]
    first = unequal[0]
    return (
        f"{len(unequal)} of {left.numel()} elements differ, first at flat index {first}: "
        f"expected {left[first].item()!r}, got {right[first].item()!r}"
    )


def _first(
    phase: str, expected: Iterable[tuple[str, Value]], actual: Iterable[tuple[str, Value]]
) -> Difference | None:
    """The first difference between two named sets of values, in the order of the expected ones."""
    left, right = dict(expected), dict(actual)
    for name, value in left.items():
        got = right.get(name)
        detail = "is missing" if got is None else _detail(value, got)
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
