"""What an examination finds: one line of the report each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """How good it is."""

    OK = "ok"
    SLOW = "slow"
    """Works; the advice says how it would be faster."""
    WARNING = "warning"
    """Works; the advice says what may surprise."""
    FAILED = "failed"
    """zeepo does not work here."""


@dataclass(frozen=True)
class Finding:
    """One fact about the machine."""

    section: str
    name: str
    text: str
    """For people."""
    value: Any = None
    """For machines, if there is a figure: bytes, seconds, bytes per second, or plain JSON."""
    state: State = State.OK
    advice: str = ""
