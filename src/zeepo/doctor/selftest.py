"""Does zeepo work here? A tiny model, trained plainly and under zeepo with everything on disk.

Run in a process of its own (`python -m zeepo.doctor.selftest DIRECTORY`), so that a crash is an
answer too. The process prints one JSON object: a text for what works, an error for what does not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeepo
from zeepo.doctor.finding import Finding, State
from zeepo.units import format_bytes

SECTION = "zeepo here"
TIMEOUT_SECONDS = 120.0
_NUM_STEPS = 3
_WIDTH = 64


def selftest_findings(directory: Path) -> Iterator[Finding]:
    """Run the self-test and tell what it found."""
    command = [sys.executable, "-m", __name__, str(directory)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads would only wait for each other
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=environ
        )
    except subprocess.TimeoutExpired:
        yield _failure("self-test", f"not over after {TIMEOUT_SECONDS:.0f} s")
        return
    seconds = time.monotonic() - start
    try:
        results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        yield _failure("self-test", f"ended with status {done.returncode}: {last[0]}")
        return
    for name, result in results.items():
        if result["works"]:
            yield Finding(SECTION, name, result["text"], True)
        else:
            yield _failure(name, result["text"])
    yield Finding(SECTION, "self-test", f"took {seconds:.1f} s", seconds)


def _failure(name: str, text: str) -> Finding:
    advice = "zeepo does not work here as it is. Please report this with `zeepo doctor --json`."
    return Finding(SECTION, name, text, False, State.FAILED, advice)


# ---- In the process of its own


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The tiny model, always with the same values."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(4)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """A few steps; the losses."""
    losses = []
    for number in range(_NUM_STEPS):
        batch = torch.sin(torch.arange(8.0 * _WIDTH) + number).reshape(8, _WIDTH)
        loss = model(batch).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def check_training(disk: Path) -> str:
    """The same bits as plainly, at the least budget."""
    plain, plain_optimizer = build()
    expected = train(plain, plain_optimizer) + list(plain.parameters())
    model, optimizer = build()
    with _open(model, optimizer, disk) as session:
        least = session.plan.minimum_ram
    with _open(model, optimizer, disk, ram=least) as session:
        losses = train(model, optimizer)
        evictions = session.stats().evictions
    found = losses + list(model.parameters())
    differing = sum(not torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    if differing:
        raise RuntimeError(f"{differing} of {len(found)} losses and parameters differ from torch's")
    if not evictions:
        raise RuntimeError("nothing was moved to disk, so nothing was tested")
    return f"the same bits as plain torch with ram={format_bytes(least)}, {evictions} evictions"


def check_building(disk: Path) -> str:
    """A lazily built model has the eager one's values."""
    eager, _ = build()
    with zeepo.lazy(disk=disk):
        model, optimizer = build()
    with _open(model, optimizer, disk):
        pass
    for (name, value), other in zip(eager.named_parameters(), model.parameters(), strict=True):
        if not torch.equal(value, other):
            raise RuntimeError(f"{name} differs from the eager constructor's")
    return "a model built by zeepo.lazy has the eager one's values"


def check_signals(disk: Path) -> str:
    """A handler of the user's is called while a session is open, once."""
    calls: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    try:
        with _open(*build(), disk):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    if calls != [signal.SIGUSR1]:
        raise RuntimeError(f"a signal's handler was called {len(calls)} times")
    return "handlers are called while a session is open"


CHECKS: dict[str, Callable[[Path], str]] = {
    "training": check_training,
    "building": check_building,
    "signals": check_signals,
}


def _open(
    model: nn.Module, optimizer: torch.optim.Optimizer, disk: Path, **options: Any
) -> zeepo.Session:
    return zeepo.init(model, optimizer, disk=disk, progress=False, events=None, **options)


def main() -> None:
    """Run every check and print what came of it."""
    directory = Path(sys.argv[1])
    results = {}
    for name, check in CHECKS.items():
        try:
            results[name] = {"works": True, "text": check(directory)}
        except Exception as error:  # whatever it is, it is the answer
            results[name] = {"works": False, "text": f"{type(error).__name__}: {error}"}
            zeepo.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
