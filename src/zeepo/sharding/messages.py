"""What ranks say to each other. Pure.

A message is sixteen numbers: a topic, an identity, how many bytes follow, the arguments, and where
the training thread of the sender is (step and phase).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum

NUM_NUMBERS = 16
NUM_ARGUMENTS = NUM_NUMBERS - 5


class Topic(IntEnum):
    """What a message is about."""

    BEAT = 1
    """I am alive, and this is where I am."""
    BYE = 2
    """I close: nothing more will come from me."""
    PULL = 3
    """Give me bytes: kind, key, version, low, high."""
    DATA = 4
    """The bytes you asked for; they follow."""
    LOAN = 5
    """The bytes you asked for lie in my memory; a table of places follows. Copy, then RETURN."""
    RETURN = 6
    """I have copied them."""
    FAIL = 8
    """What you asked for cannot be had; the reason follows."""
    NOTE = 7
    """A fact for everybody: subject, number, and bytes."""
    WAIT = 9
    """My training thread has been waiting for a while: for a fact (subject, number; subject 0 is
    something else), and the words for it follow."""
    GO = 10
    """It waits no more."""
    LEAVE = 11
    """I will not train on, and the reason follows. What I have can be asked for until BYE."""


@dataclass(frozen=True)
class Message:
    """One message, as it is sent and received."""

    topic: Topic
    identity: int = 0
    arguments: tuple[int, ...] = ()
    payload_bytes: int = 0

    position: tuple[int, int] = (0, 0)
    """Step and phase of the sender; filled in when it is sent."""

    def encode(self, position: tuple[int, int]) -> array[int]:
        """The sixteen numbers."""
        arguments = [*self.arguments, *[0] * (NUM_ARGUMENTS - len(self.arguments))]
        numbers = [int(self.topic), self.identity, self.payload_bytes, *arguments, *position]
        return array("q", numbers)


def decode(numbers: array[int]) -> Message:
    """The message that `encode` made these numbers of."""
    topic, identity, payload_bytes, *arguments, step, phase = numbers
    return Message(Topic(topic), identity, tuple(arguments), payload_bytes, (step, phase))
