"""One peer: a thread that sends to it and a thread that receives from it, in order.

Over torch.distributed's point-to-point messages on a process group of zeepo's own. What follows a
message (its payload) is received where `Receiver.place_for` says, and that must be known at once:
nothing on a link ever waits for the training thread, so links cannot lock each other up.

Payloads go in pieces, so that a long one is not taken for silence.
"""

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any, Protocol

import torch

from zeepo.sharding.messages import NUM_NUMBERS, Message, Topic, decode

HEADER_TAG = 1
PAYLOAD_TAG = 2
BEAT_SECONDS = 0.5
PIECE_BYTES = 4 << 20

Sent = Callable[[], None]


class Receiver(Protocol):
    """Who is told what arrives. Called in the link's thread."""

    def place_for(self, peer: int, message: Message) -> memoryview:
        """Where the bytes that follow `message` are to be put."""
        ...

    def receive(self, peer: int, message: Message) -> None:
        """A message has arrived, and what followed it."""
        ...

    def heard(self, peer: int) -> None:
        """A piece of what follows a message has arrived."""
        ...

    @property
    def position(self) -> tuple[int, int]:
        """Where our training thread is: step and phase."""
        ...

    def ended(self, peer: int, error: Exception | None) -> None:
        """Nothing more comes from this peer: it said goodbye, or the connection broke."""
        ...


class Link:
    """The connection to one peer."""

    def __init__(self, group: Any, peer: int, receiver: Receiver):
        self.peer = peer
        self.bytes_sent = 0
        """Headers and payloads, as given to the process group."""
        self._group = group
        self._receiver = receiver
        self._outbox: queue.SimpleQueue[tuple[Message, memoryview | None, Sent | None]] = (
            queue.SimpleQueue()
        )
        self._threads = [
            threading.Thread(target=target, name=f"zeepo-{name}-{peer}", daemon=True)
            for name, target in (("to", self._send_all), ("from", self._receive_all))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def post(
        self, message: Message, payload: memoryview | None = None, on_sent: Sent | None = None
    ) -> None:
        """Send when it is its turn; `on_sent` when the payload's memory is free again."""
        self._outbox.put((message, payload, on_sent))

    def join(self, seconds: float, *, both: bool = True) -> bool:
        """Wait until both sides have said goodbye, or only we. Whether it is so."""
        deadline = time.monotonic() + seconds
        threads = self._threads if both else self._threads[:1]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # -- the threads ------------------------------------------------------------------------------

    def _send_all(self) -> None:
        is_broken = False
        while True:
            try:
                message, payload, on_sent = self._outbox.get(timeout=BEAT_SECONDS)
            except queue.Empty:
                message, payload, on_sent = Message(Topic.BEAT), None, None
            if not is_broken:
                try:
                    self._send(message, payload)
                except RuntimeError as error:  # torch's word for a broken connection
                    is_broken = True
                    self._receiver.ended(self.peer, error)
            if on_sent is not None:
                on_sent()
            if message.topic is Topic.BYE:
                return

    def _send(self, message: Message, payload: memoryview | None) -> None:
        header = torch.frombuffer(message.encode(self._receiver.position), dtype=torch.int64)
        works = [self._group.send([header], self.peer, HEADER_TAG)]
        if payload is not None and message.payload_bytes:
            pieces = _pieces(payload)
            works += [self._group.send([piece], self.peer, PAYLOAD_TAG) for piece in pieces]
        for work in works:
            work.wait()
        self.bytes_sent += header.nbytes + message.payload_bytes

    def _receive_all(self) -> None:
        numbers = array("q", [0] * NUM_NUMBERS)
        header = torch.frombuffer(numbers, dtype=torch.int64)
        while True:
            try:
                self._group.recv([header], self.peer, HEADER_TAG).wait()
                message = decode(numbers)
                if message.payload_bytes:
                    place = self._receiver.place_for(self.peer, message)
                    self._receive_into(place)
                if message.topic is Topic.BYE:
                    self._receiver.ended(self.peer, None)
                    return
                self._receiver.receive(self.peer, message)
            except Exception as error:  # a broken connection, or a fault of ours: it is told
                self._receiver.ended(self.peer, error)
                return

    def _receive_into(self, place: memoryview) -> None:
        pieces = _pieces(place)
        works = [self._group.recv([piece], self.peer, PAYLOAD_TAG) for piece in pieces]
        for work in works:
            work.wait()
            self._receiver.heard(self.peer)


def _pieces(memory: memoryview) -> list[torch.Tensor]:
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return [whole[low : low + PIECE_BYTES] for low in range(0, memory.nbytes, PIECE_BYTES)]


def first_words(error: Exception) -> str:
    """What happened, without the file and line that torch's transport begins with."""
    text = str(error).split("] ", 1)[-1]
    return text.split(". ", 1)[0][:120]
