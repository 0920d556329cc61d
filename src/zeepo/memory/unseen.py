"""What came and went between two looks at the budget, told by the kernel's high-water mark. Pure.

The mark rises only once to each height, so what it told is not forgotten, but for another budget;
and it counts only where backward was the reason. What the user loads or saves between steps comes
once, and the first step makes states and loads code.
"""

from __future__ import annotations

MOST_SHARE = 1 / 8
"""Of `ram`, the most that is left free because of it."""


class Unseen:
    """By how much a process exceeded its budget where nobody looked."""

    def __init__(self, peak_bytes: int) -> None:
        self._known_peak_bytes = peak_bytes
        self.nbytes = 0
        """So much has to be left free."""

    def note(self, peak_bytes: int, seen_bytes: int, ram_bytes: int, *, counts: bool) -> None:
        """The process has had so much at most, and so much where somebody looked."""
        excess_bytes = peak_bytes - max(self._known_peak_bytes, seen_bytes, ram_bytes)
        self._known_peak_bytes = max(self._known_peak_bytes, peak_bytes)
        if counts and excess_bytes > 0:
            self.nbytes = min(int(MOST_SHARE * ram_bytes), self.nbytes + excess_bytes)

    def forget(self, peak_bytes: int) -> None:
        """The budget is another one from now on."""
        self._known_peak_bytes = max(self._known_peak_bytes, peak_bytes)
        self.nbytes = 0
