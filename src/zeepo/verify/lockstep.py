"""Following two runs in lockstep, and the first thing in which they differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from zeepo.verify.job import Batch, Item
from zeepo.verify.runs import Failure, Run
from zeepo.verify.values import how_different

Progress = Callable[[str], None]


class ProgramError(Exception):
    """The user's program fails by itself."""

    def __init__(self, failure: Failure):
        super().__init__(failure.summary)
        self.failure = failure


@dataclass(frozen=True)
class Difference:
    """The first thing in which two runs differ."""

    phase: str
    name: str
    unit: str
    step: int
    detail: str
    failure: Failure | None = None
    """The second run ended where the first went on."""

    def __str__(self) -> str:
        where = f" of unit {self.unit}" if self.unit else ""
        return f"step {self.step}, {self.phase}: {self.name}{where}: {self.detail}"


def follow(plain: Run, other: Run, progress: Progress) -> Difference | None:
    """Compare as both go on, and stop at the first difference; both stand at that moment.

    When there is none, `plain` is left standing at its end, so that others can be compared too.
    """
    units: dict[str, str] = {}
    for index in itertools.count():
        for run in (plain, other):
            if len(run.batches) <= index:
                run.resume()
        left, right = plain.at(index), other.at(index)
        if left is None:
            raise ProgramError(plain.failure or _silent_end(plain))
        if right is None:
            return _ended(left, other)
        units.update((item.key, item.unit) for item in right.items if item.unit)
        found = _first(left, right, units, lambda i: _values_differ(plain, other, i))
        if found is not None:
            return found
        if left.is_final:
            return None
        progress(f"step {left.step}")
    raise AssertionError("not reached")


def compare_with_finished(plain: Run, other: Run) -> Difference | None:
    """Compare a run with one that has been followed to its end.

    A run that observed only losses until its end is compared with that part of the plain one.
    """
    expected = plain.batches if other.job.observe_all else _undisturbed(plain.batches)
    units: dict[str, str] = {}
    for index, left in enumerate(expected):
        right = other.at(index)
        if right is None:
            return _ended(left, other)
        units.update((item.key, item.unit) for item in right.items if item.unit)

        def describe(item: int, is_final: bool = left.is_final) -> str | None:
            return _values_differ(plain, other, item) if is_final else None

        found = _first(left, right, units, describe)
        if found is not None:
            return found
        if not left.is_final:
            other.resume()
    return None


def _undisturbed(batches: list[Batch]) -> list[Batch]:
    """Of a run in which all was observed, what one observes that is left alone until the end."""
    kept = []
    for batch in batches:
        if not batch.is_final:
            losses = tuple(item for item in batch.items if item.phase == "loss")
            batch = replace(batch, items=losses)
        if batch.items:
            kept.append(batch)
    return kept


def _first(
    left: Batch, right: Batch, units: dict[str, str], describe: Callable[[int], str | None]
) -> Difference | None:
    """The first difference of two batches; `describe` says more about the values of an item."""
    pairs = itertools.zip_longest(left.items, right.items)
    for number, (expected, actual) in enumerate(pairs):
        if expected is None:
            return _difference(actual, units, "not there in the plain run")
        if actual is None:
            return _difference(expected, units, "missing")
        if expected.key != actual.key or expected.phase != actual.phase:
            return _difference(expected, units, f"found {actual.phase} {actual.name} in its place")
        if expected.kind != actual.kind:
            return _difference(expected, units, f"expected {expected.kind}, got {actual.kind}")
        if expected.shape != actual.shape:
            detail = f"expected shape {expected.shape}, got {actual.shape}"
            return _difference(expected, units, detail)
        if expected.digest != actual.digest:
            detail = describe(number) or "its bytes differ"
            return _difference(expected, units, detail)
    if left.is_final != right.is_final:
        short, long = ("plainly", "under zeepo") if left.is_final else ("under zeepo", "plainly")
        detail = f"the program ended {short} after step {min(left.step, right.step)}, not {long}"
        return Difference("program", "its end", "", min(left.step, right.step), detail)
    return None


def _difference(item: Item, units: dict[str, str], detail: str) -> Difference:
    unit = item.unit or units.get(item.key, "")
    return Difference(item.phase, item.name, unit, item.step, detail)


def _values_differ(plain: Run, other: Run, item_index: int) -> str | None:
    expected, actual = plain.value(item_index), other.value(item_index)
    if expected is None or actual is None:
        return None
    return how_different(expected, actual) or "its bytes differed when they were first read"


def _ended(left: Batch, other: Run) -> Difference:
    failure = other.failure or _silent_end(other)
    return Difference("exception", failure.summary, "", failure.step, "not so plainly", failure)


def _silent_end(run: Run) -> Failure:
    step = run.batches[-1].step if run.batches else 1
    return Failure(step, "the program ended where it was not expected to", "")
