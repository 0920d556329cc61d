"""Runs a user's program plainly and under zeepo.

A case is a generator function `program(start)`: ordinary training code, in which
`start(model, optimizer)` is the context that holds the session (plainly: nothing) and every
`yield name, value` is an observation. `check` runs it under zeepo at the least ram its plan accepts
and compares every bit with the plain run. A program may start several sessions one after the other,
and go on after them.
"""

from __future__ import annotations

import gc
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeepo.verify.record import Record, Report, compare, ordinary_problems, snapshot

Models = nn.Module | Sequence[nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Start = Callable[[Models, Optimizers], AbstractContextManager[None]]
Observations = Iterator[tuple[str, Any]]
Program = Callable[[Start], Observations]

AMPLE_RAM = "1GiB"
PAGE_BYTES = 4096
PLACEMENTS: dict[str, dict[str, str]] = {
    "disk": {"params": "disk", "grads": "disk", "optimizer_state": "disk"},
    "params_ram": {"params": "ram", "grads": "disk", "optimizer_state": "disk"},
    "grads_ram": {"params": "disk", "grads": "ram", "optimizer_state": "disk"},
    "ram": {"params": "ram", "grads": "ram", "optimizer_state": "ram"},
    "pieces": {"params": "disk", "grads": "disk", "optimizer_state": "disk"},
}
ON_DISK = PLACEMENTS["disk"]
PLACEMENTS["activations_recompute"] = {**ON_DISK, "activations": "recompute"}
PLACEMENTS["activations_disk"] = {**ON_DISK, "activations": "disk"}
ACTIVATIONS = ("activations_recompute", "activations_disk")
"""Placements of what backward needs, everything else on disk: every case runs in each of them."""
TUNING: dict[str, dict[str, Any]] = {
    "pieces": {"piece_bytes": 5000},
    "activations_disk": {"smallest_activation_bytes": 1, "activation_window_bytes": 4096},
}
"""Engine settings that come with a placement: `pieces` cuts every update into small parts, and the
activations of small models would not be worth moving otherwise."""
USUAL = ("disk", "params_ram", "grads_ram", "ram")


@dataclass(frozen=True)
class Case:
    """A user's program and what the harness must know about it."""

    name: str
    program: Program
    slow: bool = False
    compiles: bool = False
    whole: bool = False
    """Needs what no plan made at init can know (every parameter in one call, a module added
    later): ram for all parameters is added to the least."""
    placements: tuple[str, ...] = USUAL
    shows_activations: bool = False
    """Observes what is kept for backward, which another placement of activations changes."""

    @property
    def every_placement(self) -> tuple[str, ...]:
        return self.placements if self.shows_activations else (*self.placements, *ACTIVATIONS)


CASES: dict[str, Case] = {}


def case(name: str, **options: Any) -> Callable[[Program], Program]:
    """Register a program under a name; options are the fields of `Case`."""

    def register(program: Program) -> Program:
        if name in CASES:
            raise ValueError(f"two cases are called {name}")
        CASES[name] = Case(name, program, **options)
        return program

    return register


def as_list(item: Any) -> list[Any]:
    """One or several, as a list."""
    return list(item) if isinstance(item, list | tuple) else [item]


class _Probed(BaseException):
    """Ends a program whose plan has been read; not to be caught by the program."""


def run_program(case_: Case, record: Record, start: Start) -> None:
    """Run the program to its end from the same random state, keeping what it shows."""
    torch.manual_seed(0)
    random.seed(0)
    if case_.compiles:
        torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for name, item in case_.program(start):
                record.observe(name, item)
        finally:
            if case_.compiles:
                torch._dynamo.reset()
    record.observe("torch random state", torch.get_rng_state())
    record.observe("python random state", str(random.getstate()))
    record.warnings = {f"{entry.category.__name__}: {entry.message}" for entry in caught}


def run_plain(case_: Case) -> Record:
    """Run the program with plain PyTorch."""
    record = Record()

    @contextmanager
    def start(models: Models, optimizers: Optimizers) -> Iterator[None]:
        yield
        seen = snapshot(as_list(models), as_list(optimizers))
        record.before_close.append(seen)
        record.after_close.append(seen)

    run_program(case_, record, start)
    return record


@cache
def expected_record(name: str) -> Record:
    """The plain run of a case, once per process."""
    return run_plain(CASES[name])


def _minimum_ram(
    case_: Case, models: Models, optimizers: Optimizers, options: Mapping[str, Any]
) -> int:
    """The least ram the plan for these objects accepts."""
    import zeepo

    extra = 0
    if case_.whole:
        parameters = {p for model in as_list(models) for p in model.parameters()}
        extra = sum(p.numel() * p.element_size() + PAGE_BYTES for p in parameters)
    session = zeepo.init(models, optimizers, **{**options, "ram": AMPLE_RAM})
    try:
        return int(session.plan.minimum_ram) + extra
    finally:
        session.close()


def probe_minimum_ram(case_: Case, options: Mapping[str, Any]) -> int:
    """The least ram for the program's first session, read from a fresh build of its objects."""
    found: list[int] = []

    @contextmanager
    def start(models: Models, optimizers: Optimizers) -> Iterator[None]:
        found.append(_minimum_ram(case_, models, optimizers, options))
        raise _Probed
        yield

    with suppress(_Probed):
        run_program(case_, Record(), start)
    return found[0]


def _merge_stats(total: dict[str, Any], stats: Mapping[str, Any]) -> None:
    """Add the counts of one more session to those of the ones before it."""
    for name, count in stats.items():
        if isinstance(count, Mapping):
            _merge_stats(total.setdefault(name, {}), count)
        elif isinstance(count, int | float) and not isinstance(count, bool):
            total[name] = total.get(name, 0) + count


def run_zeepo(case_: Case, ram_bytes: int, options: Mapping[str, Any]) -> Record:
    """Run the program under zeepo; later sessions of one program get their own minimum."""
    import zeepo

    record = Record()

    @contextmanager
    def start(models: Models, optimizers: Optimizers) -> Iterator[None]:
        held, steppers = as_list(models), as_list(optimizers)
        again = bool(record.after_close)
        ram = _minimum_ram(case_, models, optimizers, options) if again else ram_bytes
        session = zeepo.init(models, optimizers, **{**options, "ram": ram})
        try:
            yield
            record.before_close.append(snapshot(held, steppers))
            stats = session.stats()
            record.num_units = int(session.plan.num_units)
            _merge_stats(record.stats, stats)
            if stats["evictions"] != stats.evictions:
                record.problems.append("stats() as a mapping and as attributes disagree")
        finally:
            session.close()
        record.after_close.append(snapshot(held, steppers))
        record.problems += ordinary_problems(held, "after close")

    run_program(case_, record, start)
    return record


def _engine_problems(record: Record, expected: Record, uses_disk: bool) -> list[str]:
    """What the engine did not do although every bit may be equal."""
    problems = list(record.problems)
    problems += [f"new warning: {text}" for text in sorted(record.warnings - expected.warnings)]
    if not record.after_close:
        return [*problems, "no session was started"]
    if not uses_disk:
        return problems
    evictions, reuses = record.stats["evictions"], record.stats["buffer_reuses"]
    if record.num_units < 3:
        problems.append(f"{record.num_units} units, at least 3 are needed to see a stale buffer")
    if evictions < 2 * record.num_units:
        problems.append(f"{evictions} evictions, fewer than 2 x {record.num_units} units")
    if reuses < 1:
        problems.append("no buffer was reused")
    return problems


def _without_gradients(record: Record) -> Record:
    """Without those that are left when a program ends."""

    def rest(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if not name.endswith(".grad")}

    before, after = map(rest, record.before_close), map(rest, record.after_close)
    return replace(record, before_close=list(before), after_close=list(after))


def check(
    case_: Case,
    placement: str,
    scratch: Path,
    *,
    extra_bytes: int = 0,
    options: Mapping[str, Any] | None = None,
    with_gradients: bool = True,
) -> Report:
    """Run a case under zeepo and report how it differs from the plain run.

    `extra_bytes` are added to the least ram; `options` go to `zeepo.init` as they are. Gradients
    that a program leaves at its end are compared unless told otherwise.
    """
    began = time.perf_counter()
    expected = expected_record(case_.name)
    chosen = {**PLACEMENTS[placement], "disk": str(scratch), **(options or {})}
    from zeepo.engine.tuning import tuned

    # What a step will need is estimated in a child: it costs time and cannot change a number here.
    with tuned(estimate=placement in ACTIVATIONS, **TUNING.get(placement, {})):
        ram_bytes = probe_minimum_ram(case_, chosen) + extra_bytes
        gc.collect()
        actual = run_zeepo(case_, ram_bytes, chosen)
    if not with_gradients:
        expected, actual = _without_gradients(expected), _without_gradients(actual)
    return Report(
        program=case_.name,
        placement=placement,
        differences=compare(expected, actual),
        problems=_engine_problems(actual, expected, "disk" in PLACEMENTS[placement].values()),
        stats=actual.stats,
        num_units=actual.num_units,
        ram_bytes=ram_bytes,
        seconds=time.perf_counter() - began,
    )
