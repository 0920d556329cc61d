"""Values changed by hand on several ranks, and parameters and gradients out of the ordinary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.change_programs import (
    changed_right_after_the_step,
    closed_without_sync,
    late_parameters,
    left_different,
    read_by_one_rank,
    swapped_on_one_rank,
    two_backwards_of_uneven_batches,
    unreducible,
    written_by_numpy,
)
from tests.dist.ranks import Ranks

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("program", "stage"),
    [
        (written_by_numpy, 3),
        (swapped_on_one_rank, 1),
        (late_parameters, 3),
        (closed_without_sync, 2),
        (changed_right_after_the_step, 1),
        (read_by_one_rank, 3),
        pytest.param(read_by_one_rank, 1, marks=SLOW),
        pytest.param(changed_right_after_the_step, 2, marks=SLOW),
        pytest.param(written_by_numpy, 2, marks=SLOW),
        pytest.param(late_parameters, 1, marks=SLOW),
        pytest.param(closed_without_sync, 3, marks=SLOW),
    ],
)
def test_like_plain_torch(
    ranks: Ranks, tmp_path: Path, program: Callable[..., Any], stage: int
) -> None:
    expected = ranks.run(2, program, None, None)
    assert ranks.run(2, program, stage, str(tmp_path)) == expected


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_different_values_are_refused_in_every_stage(ranks: Ranks, stage: int) -> None:
    for message in ranks.run(2, left_different, stage):
        assert "layers.2 was changed to other values on rank 1 than on rank 0" in message


@pytest.mark.parametrize(
    ("kind", "words"), [("sparse", "a sparse gradient"), ("graph", "a gradient with a graph")]
)
def test_what_cannot_be_reduced_is_refused(ranks: Ranks, kind: str, words: str) -> None:
    for message in ranks.run(2, unreducible, kind):
        assert words in message
        assert "cannot reduce it over several ranks" in message


def test_two_backwards_of_uneven_batches(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, two_backwards_of_uneven_batches, 3, str(tmp_path)) == [True, True]
