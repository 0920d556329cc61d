"""Settings that may cost time or memory but never change a number.

Not options of `init`: `zeepo verify` and the tests turn them to find which mechanism is to blame,
and to make small models exercise what only large ones would.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Tuning:
    """The settings in force."""

    prefetch: bool = True
    """Read ahead and write early, following the trace."""
    piece_bytes: int = 32 << 20
    """Largest part of a parameter that is updated at once."""
    put_off: bool = True
    """Updates wait until their chunk is used, so that the next forward hides them."""
    smallest_activation_bytes: int = 64 << 10
    """Smaller ones stay in RAM: moving them would cost more than it frees."""
    activation_window_bytes: int = 32 << 20
    """How many bytes of activations stay, are being written, and are read ahead (mode "disk")."""
    estimate: bool = True
    """Before the first step the model runs on shapes, in a child, to tell what it will need."""
    least_ram: bool = False
    """A session whose ram is not stated gets the least its plan accepts, so that all moves."""
    rank_patience_seconds: float = 60.0
    """A rank that is not heard of for this long is given up."""


def _from_environment() -> Tuning:
    return Tuning(
        prefetch=os.environ.get("ZEEPO_TUNING_PREFETCH", "1") != "0",
        estimate=os.environ.get("ZEEPO_TUNING_ESTIMATE", "1") != "0",
        put_off=os.environ.get("ZEEPO_TUNING_PUT_OFF", "1") != "0",
        piece_bytes=int(os.environ.get("ZEEPO_TUNING_PIECE_BYTES", str(32 << 20))),
        smallest_activation_bytes=int(
            os.environ.get("ZEEPO_TUNING_SMALLEST_ACTIVATION_BYTES", str(64 << 10))
        ),
        activation_window_bytes=int(
            os.environ.get("ZEEPO_TUNING_ACTIVATION_WINDOW_BYTES", str(32 << 20))
        ),
        rank_patience_seconds=float(os.environ.get("ZEEPO_TUNING_RANK_PATIENCE_SECONDS", "60")),
    )


_current: list[Tuning] = []


def tuning() -> Tuning:
    """The settings for a session opened now."""
    return _current[-1] if _current else _from_environment()


@contextmanager
def tuned(**changes: Any) -> Iterator[None]:
    """Other settings for sessions opened inside the block."""
    _current.append(replace(tuning(), **changes))
    try:
        yield
    finally:
        _current.pop()
