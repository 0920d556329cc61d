"""Memory of gradients that went, kept for those that come next.

With `update="backward"` a layer's gradients go before the next layer's come. The C library gives
memory of this size back to the system at once, which has to clear it again page by page: of a GPT
with 1.4 billion parameters that was 4 % of a step. So it is kept here meanwhile, in the room that
is left to torch anyway (`budget`), and goes as soon as anybody needs that room.
"""

from __future__ import annotations

from torch import UntypedStorage

WORTH_KEEPING_BYTES = 32 << 20
"""Above this the C library always asks the system for memory, and gives it back when it is free."""


class Spares:
    """Memory that nobody uses, by size."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[UntypedStorage]] = {}
        self.nbytes = 0
        self.num_reuses = 0

    def has(self, nbytes: int) -> bool:
        return nbytes in self._by_size

    def keep(self, memory: UntypedStorage) -> None:
        nbytes = memory.nbytes()
        self._by_size.setdefault(nbytes, []).append(memory)
        self.nbytes += nbytes

    def take(self, nbytes: int) -> UntypedStorage | None:
        """Memory of exactly that size, if there is some."""
        if not self.has(nbytes):
            return None
        self.num_reuses += 1
        return self._pop(nbytes)

    def let_go(self, nbytes: int | None = None) -> int:
        """Give `nbytes` or more back to the system (default all), the largest first; how many."""
        freed_bytes = 0
        while self._by_size and (nbytes is None or freed_bytes < nbytes):
            freed_bytes += self._pop(max(self._by_size)).nbytes()
        return freed_bytes

    def _pop(self, nbytes: int) -> UntypedStorage:
        alike = self._by_size[nbytes]
        memory = alike.pop()
        if not alike:
            del self._by_size[nbytes]
        self.nbytes -= nbytes
        return memory
