"""Does zeepo work here? A tiny model, plainly and under zeepo: everything on disk, and its parts.

Run in a process of its own (`python -m zeepo.doctor.selftest DIRECTORY`), so that a crash is an
answer too. The process prints one JSON object: a text for what works, an error for what does not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

import zeepo
from zeepo.doctor.finding import Finding, State
from zeepo.engine.tuning import tuned
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


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, after_step: Callable[[int], object] = int
) -> list[Tensor]:
    """A few steps; the losses, and the parameters after them."""
    losses = []
    for number in range(_NUM_STEPS):
        batch = torch.sin(torch.arange(8.0 * _WIDTH) + number).reshape(8, _WIDTH)
        loss = model(batch).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        after_step(number)
    return losses + [p.detach().clone() for p in model.parameters()]


def check_training(disk: Path) -> str:
    """The same bits as plainly, at the least budget."""
    least = _least_ram(disk)
    model, optimizer = build()
    with _open(model, optimizer, disk, ram=least) as session:
        found = train(model, optimizer)
        evictions = session.stats().evictions
    _compare(found)
    _refuse_none(evictions)
    return f"the same bits as plain torch with ram={format_bytes(least)}, {evictions} evictions"


def check_activations(disk: Path) -> str:
    """The same bits when what autograd saves is on disk, and when it is computed again."""
    for where in ("disk", "recompute"):
        model, optimizer = build()
        with (
            tuned(estimate=False, smallest_activation_bytes=1, activation_window_bytes=0),
            _open(model, optimizer, disk, activations=where) as session,
        ):
            found = train(model, optimizer)
            if where == "disk":
                _refuse_none(session.stats().activations_fetched)
        _compare(found)
    return "the same bits with activations on disk, and recomputed"


def check_resizing(disk: Path) -> str:
    """The same bits when the budget changes in the middle."""
    least = _least_ram(disk)
    model, optimizer = build()
    with tuned(estimate=False), _open(model, optimizer, disk, ram=2 * least) as session:
        found = train(model, optimizer, lambda step: session.resize(ram=least + step))
        _refuse_none(session.stats().evictions)
    _compare(found)
    return "the same bits when ram is halved while training"


def check_export(disk: Path) -> str:
    """What is written is what safetensors reads, and what a lazily built model gets."""
    model, optimizer = build()
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        path = Path(folder) / "weights.safetensors"
        with tuned(estimate=False), _open(model, optimizer, disk) as session:
            train(model, optimizer)
            session.export(path)
        read = safetensors.torch.load_file(path)
        with zeepo.lazy(disk=disk, progress=False):
            loaded, its_optimizer = build()
        zeepo.load_safetensors(loaded, path)
        with _open(loaded, its_optimizer, disk):
            pass
    _compare([read[name] for name, _ in model.named_parameters()])
    _compare(list(loaded.parameters()))
    return "safetensors out and in, bit for bit"


def _least_ram(disk: Path) -> int:
    with _open(*build(), disk) as session:
        return session.plan.minimum_ram


def _compare(found: list[Tensor]) -> None:
    """Raise unless these, the last of what `train` returns, are what plain torch gives."""
    expected = train(*build())[-len(found) :]
    differing = sum(not torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    if differing:
        raise RuntimeError(f"{differing} of {len(found)} losses and parameters differ from torch's")


def _refuse_none(num_moved: int) -> None:
    if not num_moved:
        raise RuntimeError("nothing was moved to disk, so nothing was tested")


def check_building(disk: Path) -> str:
    """A lazily built model has the eager one's values."""
    eager, _ = build()
    with zeepo.lazy(disk=disk, progress=False):
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
    "activations": check_activations,
    "resizing": check_resizing,
    "building": check_building,
    "export": check_export,
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
