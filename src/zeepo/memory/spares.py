"""Memory of gradients that went, kept for those that come next.

With `update="backward"` a gradient goes before the next comes, and the C library gives memory of
this size back to the system at once, which has to clear it again page by page: of a GPT with 1.4
billion parameters that was 4 % of a step. So it is kept, from step to step, as part of the ledger,
where it takes the place that would otherwise be left to torch for the same gradients (`budget`). It
goes when chunks alone do not make room, and what nobody took in a whole backward goes at its end:
not every gradient can be made in memory that is given to it.
"""

from __future__ import annotations

from torch import UntypedStorage

from zeepo.memory.ledger import Reservation

WORTH_KEEPING_BYTES = 32 << 20
"""Above this the C library always asks the system for memory, and gives it back when it is free."""
SPARE_TAG = "gradient memory"
TRY_AGAIN = 32
"""A size that was kept in vain is kept again after so many backwards."""


class Spares:
    """Memory that nobody uses, by size, with its place in the ledger."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[tuple[UntypedStorage, Reservation]]] = {}
        self._lent: dict[int, Reservation] = {}
        """By address, what gradients are being made in."""
        self._least: dict[int, int] = {}
        """How many of a size there were at least since backward began."""
        self._taken: set[int] = set()
        """Sizes that were of use since then."""
        self._in_vain: dict[int, int] = {}
        """Sizes that nobody took in a whole backward, and which that was."""
        self._num_backwards = 0
        self.nbytes = 0
        self.num_reuses = 0

    @property
    def lent_bytes(self) -> int:
        return sum(reservation.nbytes for reservation in self._lent.values())

    def is_wanted(self, nbytes: int) -> bool:
        """Whether memory of a size is worth keeping, by what became of it before."""
        tried = self._in_vain.get(nbytes)
        return tried is None or self._num_backwards - tried >= TRY_AGAIN

    def has(self, nbytes: int) -> bool:
        return nbytes in self._by_size

    def keep(self, memory: UntypedStorage, reservation: Reservation) -> None:
        nbytes = memory.nbytes()
        reservation.retag(SPARE_TAG)
        self._by_size.setdefault(nbytes, []).append((memory, reservation))
        self.nbytes += nbytes

    def take(self, nbytes: int) -> UntypedStorage | None:
        """Memory of exactly that size, if there is some, to make a gradient in."""
        if not self.has(nbytes):
            return None
        self.num_reuses += 1
        memory, reservation = self._pop(nbytes)
        self._taken.add(nbytes)
        self._in_vain.pop(nbytes, None)
        before = self._lent.pop(memory.data_ptr(), None)  # what was there has died since
        if before is not None:
            before.release()
        self._lent[memory.data_ptr()] = reservation
        return memory

    def arrived(self, memory: UntypedStorage) -> Reservation | None:
        """A gradient was made; its place in the ledger, if it is in memory of ours."""
        reservation = self._lent.get(memory.data_ptr())
        if reservation is None or reservation.nbytes != memory.nbytes():
            return None
        return self._lent.pop(memory.data_ptr())

    def forget_lent(self) -> None:
        """What no gradient arrived in (its backward failed, or it was added to another) is
        torch's."""
        for reservation in self._lent.values():
            reservation.release()
        self._lent.clear()

    def begin_backward(self) -> None:
        self.forget_lent()
        self._taken.clear()
        self._least = {nbytes: len(alike) for nbytes, alike in self._by_size.items()}

    def end_backward(self) -> None:
        """What was there all the time is not needed."""
        self.forget_lent()
        self._num_backwards += 1
        for nbytes, num_idle in self._least.items():
            if num_idle and nbytes not in self._taken:
                self._in_vain[nbytes] = self._num_backwards
                num_idle = len(self._by_size[nbytes])
            for _ in range(num_idle):
                self._give_back(nbytes)
        self._least = {}

    def let_go(self, nbytes: int | None = None) -> int:
        """Give `nbytes` or more back to the system (default all), the largest first; how many."""
        freed_bytes = 0
        while self._by_size and (nbytes is None or freed_bytes < nbytes):
            freed_bytes += self._give_back(max(self._by_size))
        return freed_bytes

    def _give_back(self, nbytes: int) -> int:
        memory, reservation = self._pop(nbytes)
        del memory  # before others may have its room
        reservation.release()
        return nbytes

    def _pop(self, nbytes: int) -> tuple[UntypedStorage, Reservation]:
        alike = self._by_size[nbytes]
        found = alike.pop()
        if nbytes in self._least:
            self._least[nbytes] = min(self._least[nbytes], len(alike))
        if not alike:
            del self._by_size[nbytes]
        self.nbytes -= nbytes
        return found
