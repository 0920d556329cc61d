"""zeepo's own optimizers on several ranks have the bits they have in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.own_programs import other_clip_factors, train_own
from tests.dist.ranks import Ranks

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("stage", "kind", "state_dtype"),
    [
        (3, "AdamW", "8bit"),
        (3, "AdamW", "bf16"),
        pytest.param(1, "SGD", "8bit", marks=SLOW),
        pytest.param(2, "Lion", "bf16", marks=SLOW),
        pytest.param(3, "AdamW", "fp32", marks=SLOW),
    ],
)
def test_ranks_have_the_bits_of_one_process(
    ranks: Ranks, tmp_path: Path, stage: int, kind: str, state_dtype: str
) -> None:
    expected = ranks.run(2, train_own, None, None, kind, state_dtype)
    assert ranks.run(2, train_own, stage, str(tmp_path), kind, state_dtype) == expected


def test_ranks_have_to_clip_alike(ranks: Ranks) -> None:
    for message in ranks.run(2, other_clip_factors, 3):
        assert "differs from rank 0 in the hyperparameters" in message
