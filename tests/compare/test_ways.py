"""What is compared, and how a metric is found in what a program prints."""

import json
import math

import pytest

from zeepo.compare.ways import KEYS, Result, RunFacts, all_ways, find_metric


def test_every_way_has_its_key() -> None:
    assert tuple(way.key for way in all_ways(2)) == KEYS
    assert [way.key for way in all_ways(1)] == ["plain", "disk"]


@pytest.mark.parametrize(
    ("output", "metric", "expected"),
    [
        ("epoch 1: loss 2.5\nepoch 2: loss 1.25\n", "loss", 1.25),
        ("Loss: 1e-3", "loss", 1e-3),
        ("loss=-.5, accuracy = 93.4 %", "accuracy", 93.4),
        ("loss=-.5, accuracy = 93.4 %", "loss", -0.5),
        ("test loss 3\nvalloss 4", "loss", 3.0),
        ("loss nan", "loss", None),
        ("loss: nan accuracy: 0.5", "accuracy", 0.5),
        ("loss: nan accuracy: 0.5", "loss", None),
        ("loss: inf, best: 2.0", "loss", float("inf")),
        ("loss at epoch 3: 0.7", "loss", None),
        ("loss 1,234.5", "loss", 1234.5),
        ("acc%: 55.0", "acc%", 55.0),
        ("loss(train): 0.4 loss(val): 0.6", "loss(val)", 0.6),
        ("loss -> 0.25", "loss", 0.25),
        ("accuracy ..... 0.9", "accuracy", 0.9),
        ("nothing", "loss", None),
    ],
)
def test_the_last_value_counts(output: str, metric: str, expected: float | None) -> None:
    found = find_metric(output, metric)
    if "nan" in output and metric == "loss":
        assert found != found
    else:
        assert found == expected


def test_spread_and_difference() -> None:
    plain, other = all_ways(1)
    a = Result(plain, (RunFacts(1.0, 10, 2.0), RunFacts(3.0, 30, 2.5)))
    b = Result(other, (RunFacts(1.0, 10, 2.0), RunFacts(3.0, 30, 2.75)))
    assert (a.metric, a.spread, a.peak_bytes) == (2.25, 0.5, 30)
    assert b.difference(a) == 0.25
    assert Result(other, (RunFacts(1.0, 10, None),)).metric is None


def test_range_of_times_and_budget() -> None:
    way = all_ways(1)[1]
    runs = (RunFacts(3.0, 10, 2.0, ram_bytes=70), RunFacts(1.0, 10, 2.0, ram_bytes=80))
    assert Result(way, runs).seconds_range == (1.0, 3.0)
    assert Result(way, runs).ram_bytes == 80
    assert Result(way, (RunFacts(1.0, 10, None),)).ram_bytes is None


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf, None])
def test_what_json_cannot_hold_is_null(metric: float | None) -> None:
    result = Result(all_ways(1)[0], (RunFacts(1.0, 10, metric), RunFacts(1.0, 10, 0.5)))
    found = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert [run["metric"] for run in found["runs"]] == [None, 0.5]
    assert found["way"]["key"] == "plain"
    assert found["failure"] == ""
