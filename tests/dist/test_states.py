"""Optimizer state on several ranks: whoever reads or loads it, at whatever moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.ranks import Ranks
from tests.dist.state_programs import (
    other_model,
    state_before_the_first_step,
    state_on_one_rank_only,
    tiny_parameters,
    two_optimizers_of_one_chunk,
)

SLOW = pytest.mark.slow
STAGES = [3, pytest.param(1, marks=SLOW)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["adagrad", "stepped"])
def test_state_is_read_before_the_first_step(
    ranks: Ranks, tmp_path: Path, stage: int, kind: str
) -> None:
    expected = ranks.run(2, state_before_the_first_step, None, None, kind)
    actual = ranks.run(2, state_before_the_first_step, stage, str(tmp_path), kind)
    assert actual == expected


@pytest.mark.parametrize("stage", STAGES)
def test_two_optimizers_of_one_chunk(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    expected = ranks.run(2, two_optimizers_of_one_chunk, None, None)
    assert ranks.run(2, two_optimizers_of_one_chunk, stage, str(tmp_path)) == expected


@pytest.mark.parametrize(
    ("num_ranks", "stage", "kind"),
    [
        (2, 3, "zeepo.8bit"),
        pytest.param(3, 3, "Adagrad", marks=SLOW),
        pytest.param(2, 1, "AdamW", marks=SLOW),
        pytest.param(4, 3, "AdamW", marks=SLOW),
    ],
)
def test_fewer_elements_than_ranks(
    ranks: Ranks, tmp_path: Path, num_ranks: int, stage: int, kind: str
) -> None:
    expected = ranks.run(num_ranks, tiny_parameters, None, None, kind)
    assert ranks.run(num_ranks, tiny_parameters, stage, str(tmp_path), kind) == expected


def test_state_that_only_one_rank_has_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(2, state_on_one_rank_only):
        assert "init: the state of AdamW on rank 1 is not that of rank 0" in message


def test_different_models_are_refused(ranks: Ranks) -> None:
    for message in ranks.run(2, other_model, 3):
        assert "the models differ: rank 1 has 2.weight (4, 4) torch.float32 where rank 0" in message
        assert "has nothing" in message
