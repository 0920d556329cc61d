"""Byte counts: what people write, what they read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeepo.units import GiB, KiB, MiB, TiB, enough_bytes, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 * GiB),
        ("512MB", 512 * 10**6),
        ("1.5 GiB", 3 * GiB // 2),
        (" 64 mib ", 64 * MiB),
        ("0.1TB", 10**11),
        (".5KiB", 512),
        ("1048576", MiB),
        ("7B", 7),
        ("0", 0),
        (4096, 4096),
        (0, 0),
    ],
)
def test_parse(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


def test_parse_rounds_a_fraction_of_a_byte_down() -> None:
    assert parse_bytes("1.9999B") == 1


@pytest.mark.parametrize(
    "bad", ["", "GiB", "-1GiB", "2 G iB", "2GiBs", "2G", "1e9", "nan", "1,5GiB", "٣GiB", "2.GiB"]
)
def test_text_that_is_not_bytes_is_refused_with_the_text(bad: str) -> None:
    with pytest.raises(ValueError, match=r"bytes|unit") as raised:
        parse_bytes(bad)
    assert repr(bad) in str(raised.value)


@pytest.mark.parametrize("bad", [None, True, 1.5, b"2GiB", [1]])
def test_other_types_are_refused_with_their_name(bad: object) -> None:
    with pytest.raises(ValueError, match=type(bad).__name__):
        parse_bytes(bad)  # type: ignore[arg-type]


def test_negative_is_refused() -> None:
    with pytest.raises(ValueError, match="negative, got -1"):
        parse_bytes(-1)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1.0 KiB"),
        (12 * MiB, "12.0 MiB"),
        (3 * GiB // 2, "1.5 GiB"),
        (MiB - 1, "1.0 MiB"),
        (GiB - 1, "1.0 GiB"),
        (5000 * TiB, "5000.0 TiB"),
        (-12 * MiB, "-12.0 MiB"),
    ],
)
def test_format(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 2**60))
def test_what_is_shown_reads_back_within_its_last_digit(num_bytes: int) -> None:
    shown = format_bytes(num_bytes)
    unit_bytes = parse_bytes("1" + shown.split()[1])
    assert abs(parse_bytes(shown) - num_bytes) <= unit_bytes * 0.0500001 + 1


@given(st.integers(0, 2**70))
def test_plain_numbers_are_exact(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == num_bytes


@given(st.integers(0, 1 << 50))
def test_enough_is_enough_and_little_more(num_bytes: int) -> None:
    stated = parse_bytes(enough_bytes(num_bytes))
    assert num_bytes <= stated <= num_bytes * 1.11 + 1
