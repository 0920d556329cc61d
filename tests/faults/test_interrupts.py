"""Ctrl-C at any moment: the session can be closed, or training goes on, and nothing crashes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import zeepo
from tests.faults.small import build, run_program, train

PROGRAM = """
import random, signal, sys, threading, time
from pathlib import Path
from tests.faults.small import *

disk = Path(sys.argv[1])
generator = random.Random(int(sys.argv[2]))
main = threading.main_thread().ident

def interrupt_after(seconds):
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT))
    timer.daemon = True
    timer.start()

# In the forward: caught, and training goes on as if nothing had happened.
model, optimizer = build()
plain, plain_optimizer = build()
session = open_at_minimum(model, optimizer, disk)
train(model, optimizer, range(2)); train(plain, plain_optimizer, range(2))
caught = 0
for number in range(20):
    try:
        interrupt_after(0.002 + generator.random() * 0.01)
        with torch.no_grad() if number % 2 else torch.enable_grad():
            while True:
                model(batch(number))
    except KeyboardInterrupt:
        caught += 1
    if number % 8 == 0:
        assert train(model, optimizer, [number]) == train(plain, plain_optimizer, [number])
assert caught == 20, caught
assert all(chunk.leases == 0 for chunk in session._store.chunks())
session.close()
assert_same(model, optimizer, plain, plain_optimizer)
print("forward")

# Anywhere in a step: closed, touched, and opened again.
caught = 0
model, optimizer = build()
for number in range(6):
    session = open_at_minimum(model, optimizer, disk)
    try:
        interrupt_after(0.002 + generator.random() * 0.08)
        train(model, optimizer, range(1000))
    except KeyboardInterrupt:
        caught += 1
    session.close()
    assert_ordinary(model, optimizer)
    assert math.isfinite(touch_everything(model, optimizer))
    assert scratch_files(disk) == []
    optimizer.zero_grad()
assert caught == 6, caught
train(model, optimizer, range(2))
print("anywhere")

# While opening and closing.
for number in range(5):
    try:
        interrupt_after(0.002 + generator.random() * 0.05)
        while True:
            zeepo.init(model, optimizer, ram="1GiB", disk=disk).close()
    except KeyboardInterrupt:
        zeepo.close()
    assert_ordinary(model, optimizer)
    assert math.isfinite(touch_everything(model, optimizer))
    assert scratch_files(disk) == []
print("opening")

# Never caught: the interpreter ends as Python does, and leaves no files.
session = open_at_minimum(model, optimizer, disk)
interrupt_after(0.05)
train(model, optimizer, range(100000))
"""


def test_interrupts_at_random_moments(tmp_path: Path) -> None:
    program = "import math\n" + PROGRAM
    done = run_program(program, tmp_path, 7, timeout=120)
    assert done.stdout.split() == ["forward", "anywhere", "opening"], done.stdout + done.stderr
    assert done.returncode in (-signal.SIGINT, 130), (done.returncode, done.stderr[-2000:])
    assert "KeyboardInterrupt" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_handler_is_given_back(tmp_path: Path) -> None:
    model, optimizer = build()
    before = signal.getsignal(signal.SIGINT)
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path):
        train(model, optimizer, range(1))
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_of_the_users_is_left_alone(tmp_path: Path) -> None:
    model, optimizer = build()
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGINT)
        with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path):
            assert signal.getsignal(signal.SIGINT) is mine
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_a_handler_set_during_the_session_stays(tmp_path: Path) -> None:
    model, optimizer = build()
    before = signal.getsignal(signal.SIGINT)
    try:
        with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_in_the_users_code_is_raised_there(tmp_path: Path) -> None:
    model, optimizer = build()

    def closure() -> float:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not interrupted")

    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path):
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(closure)
        handle = model.layers[3].register_forward_hook(
            lambda *_: signal.raise_signal(signal.SIGINT)
        )
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, [0])
        handle.remove()
        train(model, optimizer, [0])
