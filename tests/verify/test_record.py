"""The comparison itself: it must see one bit, and must not stumble over NaN."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import nn

from zeepo.verify.record import Record, compare, ordinary_problems, snapshot
from zeepo.verify.values import values_of


def _record(*items: object) -> Record:
    record = Record()
    for item in items:
        record.observe("loss", item)
    return record


def _nan(payload: int) -> torch.Tensor:
    bits = torch.tensor([0x7FC00000 + payload], dtype=torch.int32)
    return bits.view(torch.float32)


EQUAL = [
    torch.randn(3, 5),
    torch.tensor(1.5),
    torch.zeros(0),
    torch.tensor([float("nan"), float("inf"), -0.0]),
    _nan(7),
    torch.randn(4, dtype=torch.complex64).conj(),
    torch.tensor([True, False]),
    torch.randn(3, dtype=torch.bfloat16),
    torch.eye(3).to_sparse(),
    float("nan"),
    None,
    {"a": [1, 2.0, "text"], "b": (torch.ones(2),)},
]


@pytest.mark.parametrize("item", EQUAL, ids=range(len(EQUAL)))
def test_a_value_equals_itself(item: object) -> None:
    assert compare(_record(item), _record(item)) == []


DIFFERENT = [
    (torch.tensor([0.0]), torch.tensor([-0.0])),
    (_nan(0), _nan(1)),
    (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    (torch.ones(2), torch.ones(1, 2)),
    (1.0, 1.0 + 2**-52),
    (1, 1.0),
    (1, 2),
    (True, False),
    ("step", "epoch"),
    (None, torch.zeros(1)),
    (torch.eye(2).to_sparse(), torch.eye(2)),
    ({"a": 1}, {"b": 1}),
    ([1, 2], [1]),
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]).nextafter(torch.tensor(9.0))),
]


@pytest.mark.parametrize(("left", "right"), DIFFERENT, ids=range(len(DIFFERENT)))
def test_the_smallest_difference_is_seen(left: object, right: object) -> None:
    assert len(compare(_record(left), _record(right))) == 1


def test_the_first_difference_is_named() -> None:
    changed = torch.zeros(7)
    changed[3] = struct.unpack("<f", struct.pack("<I", 1))[0]
    expected = _record(torch.zeros(7), torch.zeros(7), torch.zeros(7))
    (difference,) = compare(expected, _record(torch.zeros(7), changed, torch.ones(7)))
    assert difference.name == "loss[1]"
    assert "1 of 7 elements differ, first at flat index 3" in difference.detail


def test_numbers_are_shown_as_numbers() -> None:
    (number,) = compare(_record(0.5), _record(0.25))
    (count,) = compare(_record(12), _record(13))
    assert (number.detail, count.detail) == ("expected 0.5, got 0.25", "expected 12, got 13")


def test_an_observation_is_copied_when_it_is_made() -> None:
    tensor = torch.zeros(3)
    record = _record(tensor)
    tensor.add_(1)
    assert compare(record, _record(torch.zeros(3))) == []


def test_missing_and_unexpected_values_are_named() -> None:
    (missing,) = compare(_record(1.0, 2.0), _record(1.0))
    (extra,) = compare(_record(1.0), _record(1.0, 2.0))
    assert (missing.name, missing.detail) == ("loss[1]", "is missing")
    assert (extra.name, extra.detail) == ("loss[1]", "was not expected")


def test_a_snapshot_holds_everything_a_user_can_read() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    names = set(snapshot([model], [optimizer]))
    assert {
        "model0.0.weight",
        "model0.0.weight.grad",
        "model0.0.weight.requires_grad",
        "model0.1.running_mean",
        "optimizer0.state.0.exp_avg",
        "optimizer0.state.0.step",
        "optimizer0.param_groups.0.lr",
        "optimizer0.group0.owners.0",
    } <= names


def test_the_stride_of_a_parameter_counts() -> None:
    model = nn.Conv2d(3, 4, 3)
    before = Record(before_close=[snapshot([model], [])])
    model.to(memory_format=torch.channels_last)
    (difference,) = compare(before, Record(before_close=[snapshot([model], [])]))
    assert "stride" in difference.detail


def test_what_is_no_ordinary_tensor_is_named() -> None:
    class Special(nn.Parameter):
        pass

    model = nn.Linear(2, 2)
    assert ordinary_problems([model], "after close") == []
    model.weight = Special(torch.zeros(2, 2))
    assert ordinary_problems([model], "after close") == ["after close: weight is a Special"]


def test_values_of_unknown_objects_are_their_type() -> None:
    ((_, value),) = values_of("rule", object())
    assert value.kind == "object"
