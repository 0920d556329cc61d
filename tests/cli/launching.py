"""Commands as a user types them, and what the example they start has to print."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.cluster.train import build, loss_of

ROOT = Path(__file__).parent.parent.parent
CLUSTER = ROOT / "examples" / "cluster"
SECONDS = 240.0
"""Nothing here takes half of it on an idle machine."""


@dataclass(frozen=True)
class Outcome:
    """What a command printed and returned."""

    status: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """Ours, with this environment's commands first and without what decides for the launcher."""
    ours = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "ZEEPO_RAM")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    source = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return ours | {"PATH": path, "PYTHONPATH": source} | more


@contextmanager
def started(command: Sequence[str], cwd: Path, **more: str) -> Any:
    """The running command; it and all that it started in its process group end with the block."""
    program = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield program
    finally:
        if program.poll() is None:
            program.send_signal(signal.SIGTERM)  # the launcher ends its ranks
            program.communicate(timeout=60)


def outcome_of(program: subprocess.Popen[str]) -> Outcome:
    out, err = program.communicate(timeout=SECONDS)
    return Outcome(program.returncode, out, err)


def launch(*command: str, cwd: Path, **more: str) -> Outcome:
    with started(command, cwd, **more) as program:
        return outcome_of(program)


def losses_printed(out: str, num_ranks: int) -> list[float]:
    """By step; what the example prints with so many ranks."""
    found = re.findall(rf"^step (\d+), {num_ranks} ranks, loss (\S+)$", out, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(len(found))), out
    return [float(loss) for _, loss in found]


def losses_expected(num_ranks: int, num_steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One plain process that adds up every rank's gradient: mean losses, and the parameters."""
    model, optimizer = build()
    means = []
    for step in range(num_steps):
        losses = [loss_of(model, step, rank) / num_ranks for rank in range(num_ranks)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(torch.stack(losses).sum().item())
    return means, model.state_dict()


def commands_in(page: Path) -> list[str]:
    """Every line of the shell blocks of a page."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]
