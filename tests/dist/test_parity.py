"""Ranks under zeepo give the bits of DDP, whatever the stage and the tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.ranks import Ranks
from tests.dist.training import under_ddp, under_zeepo


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_two_ranks_equal_ddp(ranks: Ranks, tmp_path: Path, stage: int, where: str) -> None:
    plain = ranks.run(2, under_ddp)
    disk = str(tmp_path) if where == "disk" else None
    ours: list[Any] = ranks.run(2, under_zeepo, stage, disk, {})
    for rank in range(2):
        assert ours[rank]["seen"] == plain[rank]["seen"]
        assert ours[rank]["values"].keys() == plain[rank]["values"].keys()
        differing = [
            k for k, v in plain[rank]["values"].items() if ours[rank]["values"][k] != v
        ]
        assert differing == []
