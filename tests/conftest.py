"""What holds for every test: the same random numbers, and no session left open."""

import gc
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("zeepo", deadline=None)
settings.load_profile("zeepo")

# A shell that starts the tests in the background has Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported stays; to look at all other objects, as a close does, is short then."""
    gc.collect()
    gc.freeze()


def open_session() -> Any | None:
    """The session that is open in this process, if any; nothing is imported to find out."""
    zeepo = sys.modules.get("zeepo")
    if zeepo is None or not hasattr(zeepo, "current_session"):
        return None
    return zeepo.current_session()


@pytest.fixture
def python_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk tier as it is where nothing was compiled: its calls of `os` can be replaced."""
    monkeypatch.setattr("zeepo.memory.native_blocks.library", None)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_session_left_open() -> Iterator[None]:
    """Fail the test that leaves a session open, and close it so that the next one starts clean."""
    yield
    session = open_session()
    if session is not None:
        session.close()
        pytest.fail("the test left a zeepo session open: use `with zeepo.init(...)` or close it")
