"""Settings that may cost time or memory but never change a number.

Not options of `init`: `zeepo verify` and the tests turn them to find which mechanism is to blame,
and to make small models exercise what only large ones would.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from zeepo.config import TUNING_PREFIX, check_names
from zeepo.errors import ConfigError


@dataclass(frozen=True)
class Tuning:
    """The settings in force."""

    prefetch: bool = True
    """Read ahead and write early, following the trace."""
    piece_bytes: int = 32 << 20
    """Largest part of a parameter that is updated at once."""
    table_bytes: int = 16 << 20
    """From this size on, an embedding that is looked up by few rows is kept by rows on disk. Not
    less than gradients that are expected (engine/backward.py)."""
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
    refuse_lack: bool = True
    """A machine or cgroup with less than the least is refused. Without it: as far as it goes."""
    rank_patience_seconds: float = 60.0
    """A rank that is not heard of for this long is given up."""


def _from_environment() -> Tuning:
    """ZEEPO_TUNING_PREFETCH=0 and the like."""
    settings = {TUNING_PREFIX + field.name.upper(): field for field in fields(Tuning)}
    given = [variable for variable in os.environ if variable.startswith(TUNING_PREFIX)]
    check_names(given, tuple(settings), "among the environment variables")
    values: dict[str, Any] = {}
    for variable in given:
        field = settings[variable]
        kind: type = type(field.default)
        text = os.environ[variable]
        try:
            values[field.name] = text != "0" if kind is bool else kind(text)
        except ValueError as error:
            raise ConfigError(f"{variable}={text!r} is not a number.") from error
    return Tuning(**values)


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
