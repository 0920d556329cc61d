"""What the command tells a run, and the messages the two exchange: JSON lines over a socket.

The run says `batch` (what it observed, digests only) and stops until it is told `go` on, `send`
one value as a file, or `stop`; it ends with `end` or `error`. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Job:
    """One run of the user's program."""

    target: str
    """A script's path, or module:function."""
    arguments: tuple[str, ...]
    """What follows the target on the command line."""
    managed: bool
    """Under zeepo, or plainly."""
    num_steps: int
    observe_all: bool
    """Every tensor of every step; else losses, and every tensor at the end, without stopping."""
    directory: str
    """Where the program is run."""
    log: str = ""
    """The file that gets what the program prints."""
    disk: str = ""
    """The temporary directory for a program that states no disk."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of `init` that override the program's."""
    tuning: dict[str, Any] = field(default_factory=dict)
    """Settings of engine/tuning.py."""
    sabotage: str = ""
    """A site of zeepo/sabotage.py to break; tests only."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**{**fields, "arguments": tuple(fields["arguments"])})

    @property
    def is_function(self) -> bool:
        module, _, function = self.target.rpartition(":")
        return bool(module) and function.replace(".", "").isidentifier()


@dataclass(frozen=True)
class Item:
    """One observed value, reduced to a digest."""

    phase: str
    """loss, gradient, parameter, optimizer state, buffer; "... at the end" for the last values."""
    step: int
    """Number of its optimizer's step, from 1."""
    key: str
    """What it is, in a form that is the same in every run."""
    name: str
    """What the user calls it."""
    unit: str
    """The unit that holds it under zeepo, if known."""
    kind: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class Batch:
    """What was observed at one moment."""

    step: int
    is_final: bool
    items: tuple[Item, ...]

    def to_message(self) -> dict[str, Any]:
        rows = [list(asdict(item).values()) for item in self.items]
        return {"type": "batch", "step": self.step, "is_final": self.is_final, "items": rows}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Batch:
        items = tuple(
            Item(phase, step, key, name, unit, kind, tuple(shape), digest)
            for phase, step, key, name, unit, kind, shape, digest in message["items"]
        )
        return cls(message["step"], message["is_final"], items)


class Channel:
    """One end of the conversation."""

    def __init__(self, end: socket.socket):
        self._socket = end
        self._reader = end.makefile("r", encoding="utf-8")

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall((json.dumps(message) + "\n").encode())

    def receive(self) -> dict[str, Any] | None:
        """The next message, or None when the other end is gone."""
        try:
            line = self._reader.readline()
        except OSError:
            return None
        message: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
        return message

    def close(self) -> None:
        self._reader.close()
        self._socket.close()
