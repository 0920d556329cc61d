"""How much moves at once between ranks changes no bit: units of one weight, of three, of all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.grouping import NUM_WEIGHTS, in_groups
from tests.dist.ranks import Ranks

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("num_ranks", "stage", "where", "clip"),
    [
        pytest.param(3, 3, "disk", False, marks=SLOW),
        (2, 2, "ram", True),
        *(pytest.param(4, stage, "ram", False, marks=SLOW) for stage in (0, 1, 2, 3)),
        *(pytest.param(3, stage, "disk", True, marks=SLOW) for stage in (0, 1, 2, 3)),
    ],
)
def test_the_size_of_units_changes_no_bit(
    ranks: Ranks, tmp_path: Path, num_ranks: int, stage: int, where: str, clip: bool
) -> None:
    disk = str(tmp_path) if where == "disk" else None
    expected = None
    for group_size in (1, 3, NUM_WEIGHTS):
        answers = ranks.run(num_ranks, in_groups, stage, disk, group_size, clip)
        found = [(answer["seen"], answer["values"]) for answer in answers]
        expected = expected or found
        assert found == expected
        assert {answer["num_units"] for answer in answers} == {NUM_WEIGHTS // group_size}
        assert all(answer["sent"] > 0 for answer in answers)
