"""`zeepo verify`: does a training program give the same bits under zeepo as plainly?

In lockstep first: the program plainly and under zeepo, every gradient, parameter and optimizer
state compared at every step. Observing disturbs, so it is run under zeepo once more, left alone
until its end. If something differs, the program is run plainly a second time, for it may not be
deterministic; then the features are tried one by one to find the one to blame.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from zeepo.errors import ZeepoError
from zeepo.sabotage import SITES
from zeepo.verify.bisect import FEATURES, Feature, Trial, trials, verdict
from zeepo.verify.job import Job
from zeepo.verify.lockstep import Difference, ProgramError, compare_with_finished, follow
from zeepo.verify.runs import SABOTAGE_VARIABLE, Failure, Run, Stage

PASS, DIFFERS, ERROR = 0, 1, 2

_OPTIONS = ("ram", "disk", "disk_limit", "params", "grads", "optimizer_state", "activations")
_WIDTH_OF_A_LOG = 160
_PLACEMENTS = ("auto", "ram", "disk")


def add_command(commands: Any) -> None:
    """Add `verify` to the command line."""
    parser = commands.add_parser(
        "verify",
        help="compare a training program with itself under zeepo, bit by bit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 the same bits, 1 something differs, 2 the program or its use fails",
    )
    parser.add_argument("target", help="a script, or module:function")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="the program's own arguments: all that follows it",
    )
    parser.add_argument("--steps", type=_count, default=5, help="optimizer steps (default 5)")
    parser.add_argument(
        "--no-selfcheck",
        action="store_true",
        help="do not check that two plain runs agree when something differs",
    )
    parser.add_argument("--no-bisect", action="store_true", help="do not look for what is to blame")
    parser.add_argument(
        "--features",
        type=_features,
        default=FEATURES,
        metavar="NAME,...",
        help=f"what to try when something differs: {', '.join(f.name for f in FEATURES)}",
    )
    budget = parser.add_argument_group(
        "options of zeepo.init",
        "override the program's own; one that states none gets the least ram and a temporary disk",
    )
    budget.add_argument("--ram", help="for example 2GiB")
    budget.add_argument("--disk", help="directories, separated by " + os.pathsep)
    budget.add_argument("--disk-limit", help="for example 100GiB")
    for name in ("params", "grads", "optimizer-state"):
        budget.add_argument(f"--{name}", choices=_PLACEMENTS)
    budget.add_argument("--activations", choices=(*_PLACEMENTS, "recompute"))
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps")
    return int(text)


def _features(text: str) -> tuple[Feature, ...]:
    known = {feature.name: feature for feature in FEATURES}
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return tuple(known[name] for name in text.split(","))


def run(arguments: argparse.Namespace) -> int:
    """Verify, say what was found, and return the exit status."""
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else _WIDTH_OF_A_LOG
    console = Console(highlight=False, soft_wrap=not is_terminal, width=width)
    job = Job(
        target=arguments.target,
        arguments=tuple(arguments.arguments),
        managed=False,
        num_steps=arguments.steps,
        observe_all=True,
        directory=os.getcwd(),
        options=_chosen_options(arguments),
        sabotage=os.environ.get(SABOTAGE_VARIABLE, ""),
    )
    if not job.is_function and not Path(job.target).is_file():
        console.print(escape(f"zeepo verify: no script {job.target}; or give module:function"))
        return ERROR
    if job.sabotage and job.sabotage not in SITES:
        console.print(escape(f"zeepo verify: {SABOTAGE_VARIABLE}: no site {job.sabotage}"))
        return ERROR
    with Stage() as stage:
        verification = Verification(stage, job, arguments, console)
        try:
            return verification.run()
        except ProgramError as error:
            verification.stop_progress()
            _print_failure(console, "The program fails by itself, plainly", error.failure)
            return ERROR
        except ZeepoError as error:
            verification.stop_progress()
            console.print(escape(str(error)))
            return ERROR
        finally:
            verification.stop_progress()


def _chosen_options(arguments: argparse.Namespace) -> dict[str, Any]:
    chosen = {n: v for n in _OPTIONS if (v := getattr(arguments, n)) is not None}
    if "disk" in chosen:
        chosen["disk"] = [str(Path(part).resolve()) for part in chosen["disk"].split(os.pathsep)]
    return chosen


class Verification:
    """One `zeepo verify`, phase by phase."""

    def __init__(self, stage: Stage, job: Job, arguments: argparse.Namespace, console: Console):
        self._stage = stage
        self._plain_job = job
        self._managed_job = _managed(job, observe_all=True)
        self._arguments = arguments
        self._console = console
        self._last_progress = ""
        self._status: Status | None = console.status("starting") if console.is_terminal else None
        if self._status is not None:
            self._status.start()

    def run(self) -> int:
        """Lockstep, then undisturbed; explain the first difference."""
        plain = self._stage.start(self._plain_job)
        managed = self._stage.start(self._managed_job)
        job = self._managed_job
        difference = follow(plain, managed, lambda text: self._progress(f"lockstep: {text}"))
        plan, num_steps = managed.plan, managed.batches[-1].step if managed.batches else 0
        managed.stop()
        if difference is None and num_steps == 0:
            return self._no_step(plain)
        if difference is None:
            self._progress("once more, undisturbed")
            job = _managed(self._plain_job, observe_all=False)
            undisturbed = self._stage.start(job)
            difference = compare_with_finished(plain, undisturbed)
            undisturbed.stop()
        if difference is None:
            self._say(f"PASS  {self._target}: {num_steps} steps, every bit the same")
            self._say(f"      under zeepo: {plan}")
            return PASS
        return self._explain(plain, job, difference, plan)

    @property
    def _target(self) -> str:
        return self._plain_job.target

    def _no_step(self, plain: Run) -> int:
        self._say(f"{self._target} made no optimizer step: there is nothing to compare.")
        return ERROR

    def _explain(self, plain: Run, job: Job, difference: Difference, plan: str) -> int:
        failure = difference.failure
        if failure is not None and failure.is_refusal:
            self.stop_progress()
            _print_failure(self._console, "zeepo refuses this program", failure)
            return ERROR
        self._finish_plain(plain)
        if not self._arguments.no_selfcheck and self._is_nondeterministic(plain):
            return ERROR
        self.stop_progress()
        if failure is not None:
            title = f"FAIL  {self._target}: raises under zeepo only, in step {failure.step}"
            _print_failure(self._console, title, failure)
        else:
            self._say(f"FAIL  {self._target}: {_when(job)}the first difference is")
            _print_difference(self._console, difference)
        if plan:
            self._say(f"      under zeepo: {plan}")
        if not self._arguments.no_bisect:
            self._bisect(plain, job)
        return DIFFERS

    def _finish_plain(self, plain: Run) -> None:
        """Let the plain run go on to its end, where it waits to be compared with others."""
        while not plain.batches or not plain.batches[-1].is_final:
            if plain.at(len(plain.batches)) is None:
                failure = plain.failure or Failure(0, "the program ended early", "")
                raise ProgramError(failure)
            self._progress(f"plain: step {plain.batches[-1].step}")

    def _is_nondeterministic(self, plain: Run) -> bool:
        self._progress("is the program deterministic?")
        again = self._stage.start(self._plain_job)
        difference = compare_with_finished(plain, again)
        again.stop()
        if difference is None:
            return False
        self._say(
            f"{self._target} is not deterministic: two plain runs differ, so nothing can be said "
            "about zeepo. The first difference of the two is"
        )
        _print_difference(self._console, difference)
        self._say("      Seed every generator it uses, and torch.use_deterministic_algorithms.")
        return True

    def _bisect(self, plain: Run, job: Job) -> None:
        features = self._arguments.features
        found: list[Trial] = []
        for trial in trials(self._stage, plain, job, features):
            found.append(trial)
            self._progress(f"what is to blame? {len(found)} of {len(features)}")
        self.stop_progress()
        table = Table(box=None, pad_edge=False)
        for title in ("with", "result", "first difference"):
            table.add_column(title)
        for trial in found:
            shown = "" if trial.difference is None else _short(trial.difference)
            table.add_row(trial.feature.text, trial.result, escape(shown))
        self._console.print()
        self._console.print(table)
        self._say(verdict(found))

    def _progress(self, text: str) -> None:
        if text == self._last_progress:
            return
        self._last_progress = text
        if self._status is not None:
            self._status.update(escape(text))
        else:
            print(text, file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        self.stop_progress()
        self._console.print(escape(text))

    def stop_progress(self) -> None:
        """Clear the progress line; what follows is printed as it is."""
        if self._status is not None:
            self._status.stop()


def _managed(job: Job, *, observe_all: bool) -> Job:
    return replace(job, managed=True, observe_all=observe_all)


def _when(job: Job) -> str:
    return "" if job.observe_all else "left undisturbed (in lockstep every bit was the same), "


def _short(difference: Difference) -> str:
    name = difference.name
    if difference.failure is not None:
        name = name.partition(":")[0]  # the kind of exception, without its message
    return f"step {difference.step}, {difference.phase}: {name}"


def _print_difference(console: Console, difference: Difference) -> None:
    rows = {
        "step": str(difference.step),
        "phase": difference.phase,
        "tensor": difference.name,
        "unit": difference.unit,
        "values": difference.detail,
    }
    for name, text in rows.items():
        if text:
            console.print(escape(f"      {name:<8}{text}"))


def _print_failure(console: Console, title: str, failure: Failure) -> None:
    console.print(escape(f"{title}: {failure.summary}"))
    if failure.text:
        console.print(escape(failure.text.rstrip()))
