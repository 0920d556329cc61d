"""Settings come from variables; a wrong one is named, not ignored."""

from __future__ import annotations

import pytest

from zeepo.engine.tuning import Tuning, tuning
from zeepo.errors import ConfigError


def test_without_variables_the_defaults_hold() -> None:
    assert tuning() == Tuning()


def test_every_setting_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEEPO_TUNING_PREFETCH", "0")
    monkeypatch.setenv("ZEEPO_TUNING_PIECE_BYTES", "4096")
    monkeypatch.setenv("ZEEPO_TUNING_RANK_PATIENCE_SECONDS", "7.5")
    assert tuning() == Tuning(prefetch=False, piece_bytes=4096, rank_patience_seconds=7.5)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("ZEEPO_TUNING_PREFECH", "0", "Did you mean 'ZEEPO_TUNING_PREFETCH'"),
        ("ZEEPO_TUNING_PIECE_BYTES", "many", "ZEEPO_TUNING_PIECE_BYTES='many' is not a number"),
    ],
)
def test_a_wrong_one_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, message: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=message):
        tuning()
