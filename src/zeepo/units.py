"""Byte counts as people write them and as the code keeps them.

Inside zeepo a byte count is always a plain `int` whose name ends in `_bytes`. Text appears only at
the edges: `parse_bytes` reads what the user wrote, `format_bytes` writes what an error or a report
shows. This module imports nothing else of zeepo.
"""

import math
import re
from fractions import Fraction

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
}

_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(value: int | str) -> int:
    """Return the number of bytes that `value` states: an int, or text such as "1.5 GiB" or "512MB".

    Binary units (KiB, MiB, GiB, TiB) and decimal units (KB, MB, GB, TB) are both accepted, in any
    case; a bare number is bytes. A fraction of a byte is rounded down. Raises `ValueError` for
    anything else: the caller knows which option it came from and says so.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(
            f"expected a number of bytes or text such as '2GiB', got {value!r} "
            f"({type(value).__name__})"
        )
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"a number of bytes cannot be negative, got {value}")
        return value
    match = _TEXT.fullmatch(value)
    if match is None:
        raise ValueError(
            f"cannot read {value!r} as bytes; write it as '2GiB', '512MB' or '1048576'"
        )
    number, unit = match.groups()
    factor = _FACTORS.get(unit.lower())
    if factor is None:
        raise ValueError(
            f"unknown unit {unit!r} in {value!r}; use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB"
        )
    # Fraction, not float: "0.1TB" must be exactly 10**11 and large counts must not lose bytes.
    return math.floor(Fraction(number) * factor)


def format_bytes(num_bytes: int) -> str:
    """Return `num_bytes` with one decimal in the largest binary unit that keeps it at least 1.

    For people: "12.0 MiB", "1.5 GiB"; below 1 KiB exact ("512 B"). Negative counts (a shortfall)
    keep their sign.
    """
    sign = "-" if num_bytes < 0 else ""
    magnitude = abs(num_bytes)
    if magnitude < KiB:
        return f"{sign}{magnitude} B"
    for factor, unit in ((KiB, "KiB"), (MiB, "MiB"), (GiB, "GiB")):
        # Compare what will be shown: 1 MiB less a byte reads "1.0 MiB" and not "1024.0 KiB".
        shown = f"{magnitude / factor:.1f}"
        if float(shown) < 1024:
            return f"{sign}{shown} {unit}"
    return f"{sign}{magnitude / TiB:.1f} TiB"


def enough_bytes(num_bytes: int) -> str:
    """A size to write into an option that is at least `num_bytes`: "114.1MiB"."""
    for factor, unit in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if num_bytes >= factor:
            tenths = -(-num_bytes * 10 // factor)
            return f"{tenths // 10}.{tenths % 10}{unit}"
    return str(num_bytes)
