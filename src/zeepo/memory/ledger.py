"""Who holds the bytes of one tier's budget.

Invariant: `used_bytes` is the sum of all live reservations and never rises past `limit_bytes`;
bytes are reserved *before* they are allocated. A limit lowered below what is in use only stops new
reservations: giving bytes back is the holders' work. The ledger counts, it allocates nothing.
A guest brings its room: the limit is higher by as much from when it comes until it goes.
"""

import threading
from types import TracebackType
from typing import Self

from zeepo.errors import BudgetError, InternalError
from zeepo.units import format_bytes


class Ledger:
    """Counts the bytes held in a tier, by tag. Thread-safe; `limit_bytes=None` is unlimited."""

    def __init__(self, tier: str, limit_bytes: int | None) -> None:
        self.tier = tier
        self._lock = threading.Lock()
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._guest_bytes = 0
        self._peak_bytes = 0
        self._bytes_by_tag: dict[str, int] = {}

    @property
    def limit_bytes(self) -> int | None:
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int | None) -> None:
        with self._lock:
            self._limit_bytes = limit_bytes

    @property
    def guest_bytes(self) -> int:
        """Of the limit and of what is in use, the part that goes with its holders."""
        return self._guest_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were ever in use at once."""
        return self._peak_bytes

    @property
    def free_bytes(self) -> int:
        """What can still be reserved; a very large number when there is no limit."""
        with self._lock:
            return self._free_bytes()

    @property
    def headroom_bytes(self) -> int:
        """The same, and how much too much is in use where the limit has fallen below it."""
        with self._lock:
            return 1 << 62 if self._limit_bytes is None else self._limit_bytes - self._used_bytes

    def _free_bytes(self) -> int:
        if self._limit_bytes is None:
            return 1 << 62
        return max(0, self._limit_bytes - self._used_bytes)

    def can_reserve(self, nbytes: int) -> bool:
        return nbytes <= self.free_bytes

    def by_tag(self) -> dict[str, int]:
        """Bytes in use by tag, largest first, no zeros."""
        with self._lock:
            return self._bill()

    def _bill(self) -> dict[str, int]:
        items = ((tag, used) for tag, used in self._bytes_by_tag.items() if used)
        return dict(sorted(items, key=lambda item: (-item[1], item[0])))

    def reserve(self, tag: str, nbytes: int) -> "Reservation":
        """Take `nbytes` for `tag`, or raise `BudgetError` with the bill and take nothing."""
        if nbytes < 0:
            raise InternalError(f"cannot reserve {nbytes} bytes of {self.tier} for {tag}")
        with self._lock:
            if nbytes > self._free_bytes():
                raise BudgetError(self._refusal(nbytes))
            self._count(tag, nbytes)
        return Reservation(self, tag, nbytes)

    def admit(self, tag: str, nbytes: int) -> "Reservation":
        """Count memory that is there already, with room of its own."""
        with self._lock:
            self._count(tag, nbytes)
            self._change_guests(nbytes)
        return Reservation(self, tag, nbytes, is_guest=True)

    def _count(self, tag: str, nbytes: int) -> None:
        self._used_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        self._move_tag(tag, nbytes)

    def _change_guests(self, nbytes: int) -> None:
        self._guest_bytes += nbytes
        if self._limit_bytes is not None:
            self._limit_bytes += nbytes

    def _refusal(self, nbytes: int) -> str:
        limit_bytes = self._limit_bytes or 0
        bill = ", ".join(f"{tag} {format_bytes(used)}" for tag, used in self._bill().items())
        needed = format_bytes(self._used_bytes + nbytes)
        return (
            f"cannot place {format_bytes(nbytes)} in {self.tier}: "
            f"{format_bytes(self._free_bytes())} free of {format_bytes(limit_bytes)} "
            f"({bill or 'nothing in use'}). "
            f"Raise {self.tier} to {needed} or more, or let a lower tier hold some of it."
        )

    def _give_back(self, tag: str, nbytes: int, is_guest: bool) -> None:
        with self._lock:
            self._used_bytes -= nbytes
            self._move_tag(tag, -nbytes)
            if is_guest:
                self._change_guests(-nbytes)

    def _keep_room(self, nbytes: int) -> None:
        with self._lock:
            self._guest_bytes -= nbytes

    def _retag(self, old_tag: str, new_tag: str, nbytes: int) -> None:
        with self._lock:
            self._move_tag(old_tag, -nbytes)
            self._move_tag(new_tag, nbytes)

    def _move_tag(self, tag: str, delta_bytes: int) -> None:
        self._bytes_by_tag[tag] = self._bytes_by_tag.get(tag, 0) + delta_bytes


class Reservation:
    """Bytes held in a ledger until `release()`, which may be called twice; a context manager."""

    __slots__ = ("_ledger", "_lock", "_released", "is_guest", "nbytes", "tag")

    def __init__(self, ledger: Ledger, tag: str, nbytes: int, is_guest: bool = False) -> None:
        self._ledger = ledger
        self.is_guest = is_guest
        self._lock = threading.Lock()
        self._released = False
        self.tag = tag
        self.nbytes = nbytes

    def retag(self, tag: str) -> None:
        """Move the bytes to another line of the bill; the total does not change."""
        with self._lock:
            if self._released:
                raise InternalError(f"reservation {self.tag!r} was released and cannot be retagged")
            self._ledger._retag(self.tag, tag, self.nbytes)
            self.tag = tag

    def stay(self) -> int:
        """No guest any more, its room is the ledger's: how many bytes that is."""
        with self._lock:
            if self._released or not self.is_guest:
                return 0
            self.is_guest = False
        self._ledger._keep_room(self.nbytes)
        return self.nbytes

    def shrink(self, nbytes: int) -> None:
        """Give back all but `nbytes`; a guest's room goes with them."""
        with self._lock:
            if self._released or nbytes > self.nbytes:
                raise InternalError(f"reservation {self.tag!r} cannot shrink to {nbytes} bytes")
            given_bytes, self.nbytes = self.nbytes - nbytes, nbytes
            self._ledger._give_back(self.tag, given_bytes, self.is_guest)

    def release(self) -> None:
        with self._lock:
            if self._released:
                return
            self._released = True
        self._ledger._give_back(self.tag, self.nbytes, self.is_guest)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
