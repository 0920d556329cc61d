"""A process that has its turn when it is asked, and waits while another has its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Child:
    """Runs `serve(pipe, *args)`, which sends "ready" (or what it wants to tell first) and then
    answers every message but None, the last."""

    def __init__(self, serve: Callable[..., None], *args: object):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()  # so that a child that dies is noticed
        self.first: Any = self._pipe.recv()

    def ask(self, message: object) -> Any:
        self._pipe.send(message)
        return self._pipe.recv()

    def close(self) -> Any:
        """What it sends last, if anything."""
        self._pipe.send(None)
        try:
            last = self._pipe.recv()
        except EOFError:
            last = None
        self._process.join()
        return last


def serve(pipe: Connection, answer: Callable[[Any], object]) -> None:
    """The child's loop."""
    while (message := pipe.recv()) is not None:
        pipe.send(answer(message))
