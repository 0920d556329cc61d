"""Which mechanism is to blame: the same training with one thing changed, again and again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zeepo.verify.job import Job
from zeepo.verify.lockstep import Difference, compare_with_finished
from zeepo.verify.runs import Run, Stage


@dataclass(frozen=True)
class Feature:
    """One change to the run under zeepo."""

    name: str
    text: str
    options: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, Any] = field(default_factory=dict)
    """Settings; None is a value that depends on the model."""


def _in_ram(*kinds: str) -> dict[str, Any]:
    # ram=None: whatever the plan needs for this, though the program may state less.
    return {"ram": None, **dict.fromkeys(kinds, "ram")}


FEATURES = (
    Feature("same", "nothing changed (does it happen again?)"),
    Feature("prefetch", "prefetch off", tuning={"prefetch": False}),
    Feature("put_off", "updates done at once", tuning={"put_off": False}),
    Feature("whole", "parameters updated whole", tuning={"piece_bytes": 1 << 40}),
    Feature("pieces", "parameters updated in small pieces", tuning={"piece_bytes": None}),
    Feature("params", "params in ram", options=_in_ram("params")),
    Feature("grads", "grads in ram", options=_in_ram("grads")),
    Feature("optimizer_state", "optimizer_state in ram", options=_in_ram("optimizer_state")),
    Feature("activations", "activations in ram", options=_in_ram("activations")),
    Feature(
        "ram",
        "everything in ram",
        options=_in_ram("params", "grads", "optimizer_state", "activations"),
    ),
)


@dataclass(frozen=True)
class Trial:
    """What came of one change."""

    feature: Feature
    difference: Difference | None

    @property
    def is_refused(self) -> bool:
        """zeepo does not run so, which says nothing about the difference."""
        failure = None if self.difference is None else self.difference.failure
        return failure is not None and failure.is_refusal

    @property
    def result(self) -> str:
        if self.is_refused:
            return "cannot run"
        return "same bits" if self.difference is None else "differs"


def trials(
    stage: Stage, plain: Run, job: Job, features: Sequence[Feature], at_once: int = 2
) -> Iterator[Trial]:
    """Run the job once per feature, a few at a time, each compared with the plain run."""
    waiting = list(features)
    running: list[tuple[Feature, Run]] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            feature = waiting.pop(0)
            tuning = {
                k: small_piece_bytes(plain) if v is None else v for k, v in feature.tuning.items()
            }
            changed = replace(
                job,
                options={**job.options, **feature.options},
                tuning={**job.tuning, **tuning},
            )
            running.append((feature, stage.start(changed)))
        feature, run = running.pop(0)
        difference = compare_with_finished(plain, run)
        run.stop()
        yield Trial(feature, difference)


def small_piece_bytes(plain: Run) -> int:
    """A size of pieces that cuts the largest parameter into a few."""
    items = [i for i in plain.batches[-1].items if i.phase.startswith("parameter")]
    return max(4096, max((math.prod(i.shape) for i in items), default=0))


def verdict(found: Sequence[Trial]) -> str:
    """In words: what the difference depends on."""
    by_name = {trial.feature.name: trial for trial in found if not trial.is_refused}
    same = by_name.pop("same", None)
    if same is not None and same.difference is None:
        return (
            "It did not happen again with nothing changed: it depends on timing (a wait that is "
            "missing somewhere), so the rows below may be luck."
        )
    gone = [t.feature.text for t in by_name.values() if t.difference is None]
    if len(gone) > 1 and gone[-1] == "everything in ram":
        gone.pop()  # it follows
    stays = [t.feature.text for t in by_name.values() if t.difference is not None]
    if not gone:
        return "The difference stays with each of these: none of them is to blame."
    text = f"The difference disappears with {_listed(gone)}"
    return f"{text}; not with {_listed(stays)}." if stays else f"{text}."


def _listed(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
