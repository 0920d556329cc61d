"""Forked children, other threads, signals of the user's own: named errors, never a wrong number."""

from __future__ import annotations

import multiprocessing
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zeepo
from tests.faults.small import assert_same, batch, build, loss_of, open_at_minimum, train


def _use_in_child(model: torch.nn.Module, answers: Any) -> None:
    found = []
    for use in (lambda: model(batch(0)), zeepo.close):
        try:
            use()
        except Exception as error:
            found.append((type(error).__name__, "forked child" in str(error)))
    answers.put(found)


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_forked_child_is_refused_by_name(tmp_path: Path, num_steps: int) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    with open_at_minimum(model, optimizer, tmp_path):
        train(model, optimizer, range(num_steps))
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        child = context.Process(target=_use_in_child, args=(model, answers))
        child.start()
        assert answers.get(timeout=30) == [("SessionError", True)] * 2
        child.join(30)
        train(model, optimizer, range(num_steps, 4))
    train(plain, plain_optimizer, range(4))
    assert_same(model, optimizer, plain, plain_optimizer)


def test_close_while_another_thread_evaluates(tmp_path: Path) -> None:
    for _ in range(3):
        model, optimizer = build()
        plain, plain_optimizer = build()
        session = open_at_minimum(model, optimizer, tmp_path, extra=1 << 20)
        train(model, optimizer, range(3))
        train(plain, plain_optimizer, range(3))
        is_over = threading.Event()

        def evaluate(model: torch.nn.Module = model, over: threading.Event = is_over) -> None:
            with torch.no_grad():
                while not over.is_set():
                    model(batch(9))

        thread = threading.Thread(target=evaluate)
        thread.start()
        try:
            session.close()
        finally:
            is_over.set()
            thread.join()
        assert_same(model, optimizer, plain, plain_optimizer)


class Alarm(Exception):
    """Raised by a handler of the user's."""


def _raise_alarm(number: int, frame: object) -> None:
    raise Alarm


def test_an_evaluation_with_a_time_limit(tmp_path: Path) -> None:
    """A handler that raises, set while the session is open, as time limits do."""
    model, optimizer = build()
    plain, plain_optimizer = build()
    chooser = random.Random(1)
    num_alarms = 0
    before = signal.getsignal(signal.SIGALRM)
    with open_at_minimum(model, optimizer, tmp_path):
        for step in range(25):
            train(model, optimizer, [step])
            signal.signal(signal.SIGALRM, _raise_alarm)
            assert signal.getsignal(signal.SIGALRM) is _raise_alarm
            try:
                signal.setitimer(signal.ITIMER_REAL, chooser.uniform(0.0002, 0.004))
                for _ in range(20):
                    loss_of(model, 99)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                num_alarms += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    train(plain, plain_optimizer, range(25))
    assert_same(model, optimizer, plain, plain_optimizer)
    assert num_alarms > 5
    assert signal.getsignal(signal.SIGALRM) is _raise_alarm, "the user's own stays"
    signal.signal(signal.SIGALRM, before)
