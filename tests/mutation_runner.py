"""Runs parity cases with one site of the engine broken; a program, started by test_mutations.

    python -m tests.mutation_runner SCRATCH SITE...

Every site is tried in a forked child, because a broken engine may crash the interpreter, and for
each a line of JSON says how it ended: "survived" when every case passed. The site "none" breaks
nothing. The plain runs are done before the fork; no session may be open then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import zeepo
from tests.parity import (  # noqa: F401
    cases_backward,
    cases_extra,
    cases_put_off,
    cases_recompute,
    cases_structure,
    cases_user,
)
from tests.parity.harness import CASES, check, expected_record
from zeepo.chunks import moves
from zeepo.engine.tuning import tuned
from zeepo.memory.block_io import NativeBlocks, PythonBlocks
from zeepo.sabotage import sabotage

CHILD_SECONDS = 50
NUM_CHILDREN = 2
NOT_BY_NUMBERS = "every number is right, but:"


@dataclass(frozen=True)
class Run:
    """A parity case and the circumstances in which it is run."""

    case: str
    placement: str = "disk"
    delay_seconds: float = 0.0
    """How long every transfer waits before it touches memory: shows waits that are missing."""
    linger_seconds: float = 0.0
    """How long every transfer goes on after it touched memory: what changes then comes too late."""
    extra_bytes: int = 0
    """A little more than the least ram lets something stay there for a while."""
    piece_bytes: int = 32 << 20
    lookahead: int = moves.LOOKAHEAD_CHUNKS


PLAIN = Run("plain_perceptron_adamw")
PIECES = Run("plain_perceptron_adamw", piece_bytes=1024)
SLOW = Run("plain_perceptron_adamw", delay_seconds=0.002)
ACCUMULATES = Run("plain_perceptron_accumulates")
ROOMY = Run("plain_perceptron_adamw", extra_bytes=100 << 10)
READS_STATE = Run("reads_of_optimizer_state")
SEVERAL_CALLS = Run("module_called_several_times")
WRITES = Run("writes_right_after_step", linger_seconds=0.02, extra_bytes=100 << 10, lookahead=1)
RATE = Run("after_step_rate_in_a_tensor_changes")
READS = Run("after_step_some_are_read")
RANDOM = Run("blocks_with_random_numbers", placement="activations_recompute")
STATISTICS = Run("bottlenecks", placement="activations_recompute")
SAVED = Run("plain_perceptron_adamw", placement="activations_disk", delay_seconds=0.002)

RUNS: dict[str, list[Run]] = {
    "none": [
        *(PLAIN, PIECES, SLOW, ACCUMULATES, SEVERAL_CALLS),
        *(WRITES, ROOMY, READS_STATE, RATE, READS, RANDOM, STATISTICS, SAVED),
    ],
    "recipe.copy": [RATE],
    "update.late": [READS],
    "state.stale": [ROOMY, READS_STATE],
    "activation.write": [SAVED],
    "activation.wait": [SAVED],
    "recompute.random": [RANDOM],
    "recompute.modules": [STATISTICS],
    "fetch.wait": [SLOW],
    "evict.wait": [SLOW],
    "write.clean": [WRITES],
    "dirty.mark": [WRITES],
    "grad.drop": [ACCUMULATES],
    "grad.overwrite": [ACCUMULATES],
}
OTHER_RUNS = [PLAIN, SEVERAL_CALLS, ACCUMULATES]


@contextmanager
def slow_disk(before: float, after: float) -> Iterator[None]:
    """Let every block wait before and after it touches memory."""

    def delayed(method: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            time.sleep(before)
            method(*args)
            time.sleep(after)

        return run

    with ExitStack() as stack:
        for blocks, name in product((NativeBlocks, PythonBlocks), ("read", "write")):
            stack.enter_context(patch.object(blocks, name, delayed(getattr(blocks, name))))
        yield


def try_run(run: Run, scratch: Path) -> str:
    """Why the case fails; empty when it passes."""
    moves.LOOKAHEAD_CHUNKS = run.lookahead
    with ExitStack() as stack:
        stack.enter_context(tuned(piece_bytes=run.piece_bytes))
        if run.delay_seconds or run.linger_seconds:
            stack.enter_context(slow_disk(run.delay_seconds, run.linger_seconds))
        report = check(CASES[run.case], run.placement, scratch, extra_bytes=run.extra_bytes)
    if report.passed:
        return ""
    # What is wrong beside the numbers (too few evictions) does not show that parity would notice.
    return str(report) if report.differences else f"{NOT_BY_NUMBERS} {report}"


def attempt(site: str, scratch: Path) -> dict[str, Any]:
    """Run the cases chosen for a site until one of them notices."""
    began = time.perf_counter()
    outcome, detail, case = "survived", "", ""
    with nullcontext() if site == "none" else sabotage(site):
        for run in RUNS.get(site, OTHER_RUNS):
            case = run.case
            try:
                detail = try_run(run, scratch)
                outcome = "difference" if detail else "survived"
                if detail.startswith(NOT_BY_NUMBERS):
                    outcome = "problem"
            except Exception:
                outcome, detail = "exception", traceback.format_exc()
            if outcome != "survived":
                break
    seconds = time.perf_counter() - began
    return {"site": site, "outcome": outcome, "case": case, "detail": detail, "seconds": seconds}


def start_child(site: str, scratch: Path) -> tuple[int, Path]:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    answer = folder / "answer.json"
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_SECONDS)  # ends the child, whatever hangs
        try:
            answer.write_text(json.dumps(attempt(site, folder)))
        finally:
            os._exit(0)
    return child, answer


def answer_of(site: str, answer: Path, status: int) -> dict[str, Any]:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        outcome = "hang" if name == "SIGALRM" else "crash"
        return {"site": site, "outcome": outcome, "case": "", "detail": name, "seconds": 0}
    return dict(json.loads(answer.read_text()))


def main(scratch: Path, sites: list[str]) -> None:
    torch.set_num_threads(1)
    for case in {run.case for run in RUNS["none"]}:
        expected_record(case)  # once for all, and torch loads its lazy parts
    assert zeepo.current_session() is None
    waiting, running = list(sites), {}
    while waiting or running:
        while waiting and len(running) < NUM_CHILDREN:
            site = waiting.pop(0)
            child, answer = start_child(site, scratch)
            running[child] = site, answer
        child, status = os.wait()
        site, answer = running.pop(child)
        print(json.dumps(answer_of(site, answer, status)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
