"""The picture of a comparison."""

import math
from pathlib import Path

import pytest

from zeepo.compare.plot import draw
from zeepo.compare.ways import Result, RunFacts, all_ways


@pytest.mark.parametrize("num_seeds", [1, 3])
@pytest.mark.parametrize("metric", [0.5, math.nan, None])
def test_it_is_drawn_whatever_was_found(
    tmp_path: Path, num_seeds: int, metric: float | None
) -> None:
    pytest.importorskip("matplotlib")
    runs = tuple(RunFacts(1.0 + seed, 1 << 20, metric) for seed in range(num_seeds))
    results = [Result(way, runs) for way in all_ways(2)]
    draw([*results, Result(results[0].way, (), "failed")], "loss", "title", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
