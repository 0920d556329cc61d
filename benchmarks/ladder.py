"""Models of growing size, and the search for the largest that survives. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SEQUENCE = 64
VOCABULARY = 50304
SPACING = 1.25
WIDTHS = range(64, 64 * 200, 64)
LARGEST = "{largest}"
"""In the options of a configuration: the elements of the model's largest parameter."""


@dataclass(frozen=True)
class Rung:
    """One model of the ladder."""

    width: int

    @property
    def options(self) -> dict[str, Any]:
        number = self.width // 64
        return {
            "num_layers": number, "width": self.width, "num_heads": number,
            "vocabulary": VOCABULARY, "sequence": SEQUENCE, "checkpointing": True,
        }  # fmt: skip

    @property
    def num_parameters(self) -> int:
        width = self.width
        block = 12 * width * width + 13 * width
        return (2 * VOCABULARY + SEQUENCE + 2) * width + width // 64 * block

    def __str__(self) -> str:
        return f"{self.num_parameters / 1e6:.0f}M"


def fitted(options: dict[str, Any], rung: Rung) -> dict[str, Any]:
    """Options with what depends on the model."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        value = fitted(value, rung) if isinstance(value, dict) else value
        found[key] = VOCABULARY * rung.width if value == LARGEST else value
    return found


def ladder(smallest: float, largest: float, spacing: float = SPACING) -> list[Rung]:
    """Rungs from `smallest` to `largest` parameters, each as near to `spacing` as widths allow."""
    rungs: list[Rung] = []
    for width in WIDTHS:
        rung, following = Rung(width), Rung(width + 64)
        if rung.num_parameters < smallest:
            continue
        if rung.num_parameters > largest:
            break
        wanted = rungs[-1].num_parameters * spacing if rungs else 0.0
        is_nearest = following.num_parameters / max(wanted, 1) > wanted / rung.num_parameters
        if not rungs or rung.num_parameters >= wanted or is_nearest:
            rungs.append(rung)
    return rungs


def search(survives: Callable[[int], bool], num_rungs: int, start: int, survived: int = -1) -> int:
    """The highest rung that survives: from `start` by steps of growing length, then by halving.

    `survived` is known to; -1 stands for none. Whatever is below a survivor is taken to survive.
    """
    low, high = survived, num_rungs  # low survives, high does not
    place, stride = min(max(start, low + 1), num_rungs - 1), 1
    while high - low > 1:
        if survives(place):
            low = place
        else:
            high = place
        if low >= 0 and high < num_rungs:
            place = (low + high) // 2
        else:
            place = min(low + stride, high - 1) if low >= 0 else max(high - stride, low + 1)
            stride *= 2
    return low
