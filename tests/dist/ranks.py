"""A few processes that stay and become the ranks of one small program after another.

Starting a process that imports torch takes seconds; forming a process group takes milliseconds.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

SECONDS = 240.0
SECONDS_AFTER_FAILURE = 10.0
"""The others may wait for a rank that has failed."""
Worker = tuple[multiprocessing.process.BaseProcess, Connection]


class RankFailedError(AssertionError):
    """A rank raised; the text is its traceback."""


class Ranks:
    """Processes that wait for work."""

    def __init__(self) -> None:
        self._pools: dict[int, list[Worker]] = {}
        """By number of ranks: torch counts groups, and processes that formed others differ."""

    def run(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *args: Any,
        seconds: float = SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        """What `function(*args, **kwargs)` returns on each rank, the process group being open."""
        workers = self._start(num_ranks)
        name = (function.__module__, function.__qualname__)
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(num_ranks):
                workers[rank][1].send((rank, num_ranks, folder, name, args, kwargs))
            answers = _gather(workers, seconds)
        failures = [text for ok, text in answers if not ok]
        if failures:
            self.stop()
            raise RankFailedError("\n".join(failures))
        return [value for _, value in answers]

    def _start(self, num_ranks: int) -> list[Worker]:
        workers = self._pools.setdefault(num_ranks, [])
        context = multiprocessing.get_context("spawn")
        while len(workers) < num_ranks:
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there,), daemon=True)
            process.start()
            there.close()
            workers.append((process, here))
        return workers

    def stop(self) -> None:
        for process, connection in [worker for pool in self._pools.values() for worker in pool]:
            connection.close()
            process.kill()
            process.join()
        self._pools = {}


def _gather(workers: Sequence[Worker], seconds: float) -> list[tuple[bool, Any]]:
    waiting = {connection: rank for rank, (_, connection) in enumerate(workers)}
    answers: dict[int, tuple[bool, Any]] = {}
    while waiting:
        has_failed = not all(ok for ok, _ in answers.values())
        patience = min(seconds, SECONDS_AFTER_FAILURE) if has_failed else seconds
        ready = wait(list(waiting), timeout=patience)
        if not ready:
            for rank in waiting.values():
                answers[rank] = (False, f"rank {rank}: no answer in {patience} s")
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                answers[rank] = connection.recv()
            except EOFError:
                answers[rank] = (False, f"rank {rank} died")
    return [answers[rank] for rank in range(len(workers))]


def _work(connection: Connection) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            rank, num_ranks, folder, (module, name), args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, _in_group(rank, num_ranks, folder, module, name, args, kwargs)))
        except BaseException:
            connection.send((False, f"rank {rank}:\n{traceback.format_exc()}"))


def _in_group(
    rank: int,
    num_ranks: int,
    folder: str,
    module: str,
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
    )
    try:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)
    finally:
        dist.destroy_process_group()
