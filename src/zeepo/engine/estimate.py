"""How much a step will need, asked just before the first one, with the user's own batch.

The model's forward is run once more, on shapes ([planner/footprint]), in a forked child: whatever
the user's code does there, to its own objects, to random numbers or to the terminal, happens to the
child's copy and ends with it. The child holds no lease and does no arithmetic; it answers through a
pipe, or not at all: code that looks at values cannot run on shapes, and then nothing is known
before the first step has been measured.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from zeepo.engine import interrupts
from zeepo.planner.footprint import simulate
from zeepo.planner.plan import Footprint

PATIENCE_SECONDS = 60.0
WAIT_SECONDS = 0.05


def estimate(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    chunk_of: Mapping[int, int],
    chunk_bytes: Mapping[int, int],
    chunk_names: Mapping[int, str],
    *,
    spills: bool,
    smallest_bytes: int = 0,
) -> Footprint | str:
    """The footprint of one forward and backward, or why it cannot be told."""

    def run() -> dict[str, Any]:
        found = simulate(
            model,
            args,
            kwargs,
            chunk_of,
            chunk_bytes,
            chunk_names,
            spills=spills,
            smallest_bytes=smallest_bytes,
        )
        return asdict(found)

    answer = in_child(run)
    return answer if isinstance(answer, str) else Footprint(**answer)


class FirstForward:
    """Calls `act(model, args, kwargs)` before the first forward of each model that makes a graph.

    `nn.Module._call_impl` is watched, and only until then: a hook on the user's module would be
    copied and pickled with it.
    """

    def __init__(
        self, models: Sequence[nn.Module], act: Callable[[nn.Module, Any, Any], None]
    ) -> None:
        self._waiting = {id(model) for model in models}
        original = nn.Module._call_impl
        first = self

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(self) in first._waiting and torch.is_grad_enabled():
                first._waiting.discard(id(self))
                try:
                    act(self, args, kwargs)
                except BaseException:  # refused: to be asked again the next time
                    first._waiting.add(id(self))
                    raise
                if not first._waiting:
                    first.stop()
            return original(self, *args, **kwargs)  # type: ignore[no-untyped-call]

        nn.Module._call_impl = call  # type: ignore[method-assign]
        self._original: Any = original

    def stop(self) -> None:
        """Watch no more; harmless when that is over already."""
        if self._original is not None:
            nn.Module._call_impl = self._original  # type: ignore[method-assign]
            self._original = None


def in_child(run: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    """Call `run` in a forked child that leaves no trace; its answer, or why there is none."""
    reader, writer = os.pipe()
    gc.collect()
    gc.freeze()  # the child's collector would touch, and so copy, every page of objects
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
            child = os.fork()
        if child == 0:
            _answer_and_exit(run, writer)
    finally:
        gc.unfreeze()
    os.close(writer)
    try:
        text = _read_all(reader, time.monotonic() + PATIENCE_SECONDS)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not text:
        return "the model did not finish on shapes alone"
    answer: dict[str, Any] = json.loads(text)
    return str(answer["error"]) if "error" in answer else answer


def _answer_and_exit(run: Callable[[], dict[str, Any]], writer: int) -> None:
    """In the child: nothing of the parent's may be flushed, joined or finalized here."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (the process ends first)
        gc.disable()
        torch.set_num_threads(1)  # the parent's threads did not come along
        answer = run()
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    os.write(writer, json.dumps(answer).encode())
    os._exit(0)


def _read_all(reader: int, until: float) -> bytes:
    text = b""
    while True:
        ready, _, _ = select.select([reader], [], [], WAIT_SECONDS)
        if not ready:
            if time.monotonic() > until or interrupts.waiting:  # somebody wants to go on
                return b""
            continue
        part = os.read(reader, 1 << 16)
        if not part:
            return text
        text += part
