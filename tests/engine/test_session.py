"""The life of a session: opening, closing, what is left behind, and what a closed one refuses."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeepo
from tests.faults.small import (
    assert_ordinary,
    assert_same,
    build,
    loss_of,
    open_at_minimum,
    scratch_files,
    train,
)
from zeepo.config import OPTION_NAMES
from zeepo.errors import BudgetError, ConfigError, DiskError, SessionError, UnsupportedError
from zeepo.planner import units

PLACEMENTS = [
    {"params": "disk", "grads": "disk", "optimizer_state": "disk"},
    {"params": "ram", "grads": "ram", "optimizer_state": "ram"},
    {"params": "ram", "grads": "disk", "optimizer_state": "ram"},
]


def test_a_second_init_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    model, optimizer = build()
    other, other_optimizer = build()
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path) as session:
        with pytest.raises(SessionError, match="open already"):
            zeepo.init(other, other_optimizer, ram="1GiB", disk=tmp_path)
        with pytest.raises(SessionError, match="open already"):
            zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path)
        assert zeepo.current_session() is session
        train(model, optimizer, range(2))
    assert_ordinary(other, other_optimizer)
    train(other, other_optimizer, range(2))
    assert_same(model, optimizer, other, other_optimizer)


def test_closing_twice_and_closing_nothing(tmp_path: Path) -> None:
    zeepo.close()
    model, optimizer = build()
    session = zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path)
    assert not session.is_closed
    session.close()
    session.close()
    zeepo.close()
    assert session.is_closed
    assert scratch_files(tmp_path) == []


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s.stats(),
        lambda s: s.gathered([]).__enter__(),
        lambda s: s.no_sync().__enter__(),
        lambda s: s.__enter__(),
        lambda s: s.resize(ram="2GiB"),
        lambda s: s.register("x", object()),
        lambda s: s.save("x"),
        lambda s: s.load("x"),
        lambda s: s.export("x"),
    ],
)
def test_a_closed_session_refuses_every_use(tmp_path: Path, use: Any) -> None:
    model, optimizer = build()
    session = zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path)
    session.close()
    with pytest.raises(SessionError, match=r"closed.*zeepo\.init"):
        use(session)


def test_methods_of_later_versions_say_so(tmp_path: Path) -> None:
    model, optimizer = build()
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path) as session:
        for use in (
            lambda: session.register("x", object()),
            lambda: session.save("x"),
            lambda: session.load("x"),
        ):
            with pytest.raises(UnsupportedError, match=r"not in this version.*state_dict"):
                use()


@pytest.mark.parametrize("placement", PLACEMENTS, ids=["disk", "ram", "mixed"])
@pytest.mark.parametrize("with_grad", [False, True], ids=["after_step", "after_backward"])
def test_training_goes_on_plainly_after_close(
    tmp_path: Path, placement: dict[str, str], with_grad: bool
) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    session = (
        open_at_minimum(model, optimizer, tmp_path, **placement)
        if (placement["params"] == "disk")
        else zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path, **placement)
    )
    losses = train(model, optimizer, range(3))
    expected = train(plain, plain_optimizer, range(3))
    if with_grad:
        loss_of(model, 50).backward()
        loss_of(plain, 50).backward()
    session.close()
    assert_ordinary(model, optimizer)
    assert_same(model, optimizer, plain, plain_optimizer)
    losses += train(model, optimizer, range(3, 6))
    expected += train(plain, plain_optimizer, range(3, 6))
    assert losses == expected
    assert_same(model, optimizer, plain, plain_optimizer)
    assert scratch_files(tmp_path) == []


def test_a_graph_made_before_close_can_be_used_after_it(tmp_path: Path) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    session = open_at_minimum(model, optimizer, tmp_path)
    train(model, optimizer, range(2))
    train(plain, plain_optimizer, range(2))
    loss, expected = loss_of(model, 2), loss_of(plain, 2)
    session.close()
    loss.backward()
    expected.backward()
    optimizer.step()
    plain_optimizer.step()
    assert_same(model, optimizer, plain, plain_optimizer)


def test_sessions_one_after_the_other(tmp_path: Path) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain_optimizer, 1, 0.9)
    for start in (0, 2, 4):
        with open_at_minimum(model, optimizer, tmp_path):
            train(model, optimizer, range(start, start + 2))
            scheduler.step()
        train(plain, plain_optimizer, range(start, start + 2))
        plain_scheduler.step()
        assert_same(model, optimizer, plain, plain_optimizer)
    assert train(model, optimizer, [9]) == train(plain, plain_optimizer, [9])


def test_a_scheduler_made_inside_a_session_outlives_it(tmp_path: Path) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain_optimizer, 1, 0.5)
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        train(model, optimizer, range(2))
        scheduler.step()
    train(plain, plain_optimizer, range(2))
    plain_scheduler.step()
    for step in (2, 3):
        assert train(model, optimizer, [step]) == train(plain, plain_optimizer, [step])
        scheduler.step()
        plain_scheduler.step()
    with open_at_minimum(model, optimizer, tmp_path):
        assert train(model, optimizer, [4]) == train(plain, plain_optimizer, [4])
    assert train(model, optimizer, [5]) == train(plain, plain_optimizer, [5])
    assert_same(model, optimizer, plain, plain_optimizer)


def test_an_exception_closes_the_context(tmp_path: Path) -> None:
    model, optimizer = build()

    def failing() -> None:
        with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path):
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        failing()
    assert zeepo.current_session() is None
    assert_ordinary(model, optimizer)


class _Unadoptable(nn.Parameter):
    pass


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ram": "1MiB"}, BudgetError),
        ({"rem": "1GiB"}, ConfigError),
        ({"ram": "lots"}, ConfigError),
        ({"params": "disk", "disk": None}, ConfigError),
        ({"optimizer": 3}, Exception),
    ],
)
def test_a_failing_init_changes_nothing(
    tmp_path: Path, options: dict[str, Any], error: type[Exception]
) -> None:
    model, optimizer = build()
    train(model, optimizer, range(1))
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(error):
        zeepo.init(model, **{"optimizer": optimizer, "disk": tmp_path, **options})
    assert zeepo.current_session() is None
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert_ordinary(model, optimizer)
    assert scratch_files(tmp_path) == []
    plain, plain_optimizer = build()
    train(plain, plain_optimizer, range(1))
    assert train(model, optimizer, [1]) == train(plain, plain_optimizer, [1])


def test_a_refusal_in_the_second_optimizer_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = build()
    other, _ = build()
    refused = torch.optim.LBFGS(other.parameters())
    with pytest.raises(UnsupportedError, match="LBFGS"):
        zeepo.init([model, other], [optimizer, refused], ram="1GiB", disk=tmp_path)
    assert_ordinary(model, optimizer)
    assert_ordinary(other, refused)
    assert scratch_files(tmp_path) == []


def test_gathered(tmp_path: Path) -> None:
    """Whole values inside the block, in-place changes kept, for every kind of argument."""
    model, optimizer = build()
    plain, plain_optimizer = build()
    with open_at_minimum(model, optimizer, tmp_path) as session:
        train(model, optimizer, range(2))
        train(plain, plain_optimizer, range(2))
        for target, twin in (
            (model.layers[1], [plain.layers[1].weight, plain.layers[1].bias]),
            (model.layers[2].weight, [plain.layers[2].weight]),
            ([model.layers[3].bias], [plain.layers[3].bias]),
            (tuple(model.layers[4].parameters()), list(plain.layers[4].parameters())),
            (iter(model.layers[5].parameters()), list(plain.layers[5].parameters())),
        ):
            with session.gathered(target) as parameters, torch.no_grad():
                assert len(parameters) == len(twin)
                for p, q in zip(parameters, twin, strict=True):
                    assert torch.equal(p, q)
                    p.mul_(1.5)
                    p.data[0] = 0.25
                    q.mul_(1.5)
                    q.data[0] = 0.25
        assert train(model, optimizer, [2, 3]) == train(plain, plain_optimizer, [2, 3])
    assert_same(model, optimizer, plain, plain_optimizer)


def test_gathered_writes_through_numpy_and_keeps_them(tmp_path: Path) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    with open_at_minimum(model, optimizer, tmp_path) as session:
        with session.gathered(model.layers[6]):
            model.layers[6].weight.detach().numpy()[:] = 0.125
        plain.layers[6].weight.detach().numpy()[:] = 0.125
        assert train(model, optimizer, range(2)) == train(plain, plain_optimizer, range(2))
        strangers = [nn.Parameter(torch.ones(2)), torch.ones(3)]
        with session.gathered(strangers) as parameters:
            assert parameters == strangers
    assert_same(model, optimizer, plain, plain_optimizer)


def test_gathered_survives_an_exception_and_closing_inside(tmp_path: Path) -> None:
    model, optimizer = build()
    session = open_at_minimum(model, optimizer, tmp_path)

    def failing() -> None:
        with session.gathered(model.layers[0]):
            raise KeyError("the user's")

    with pytest.raises(KeyError):
        failing()
    assert all(chunk.leases == 0 for chunk in session._store.chunks())
    with session.gathered(model.layers[0]):
        session.close()
    assert_ordinary(model, optimizer)


def test_help_names_every_option() -> None:
    text = inspect.getdoc(zeepo.init) or ""
    assert [name for name in OPTION_NAMES if not re.search(rf"\b{name}\b", text)] == []


def test_a_disk_limit_that_cannot_be_enough_is_refused_at_init(tmp_path: Path) -> None:
    model, optimizer = build()
    with open_at_minimum(model, optimizer, tmp_path) as session:
        least, needed = session.plan.minimum_ram, session.plan.disk_bytes
    with pytest.raises(DiskError, match=r"disk_limit=.* is too little"):
        zeepo.init(model, optimizer, ram=least, disk=tmp_path, disk_limit=50_000)
    assert scratch_files(tmp_path) == []
    with zeepo.init(model, optimizer, ram=least, disk=tmp_path, disk_limit=2 * needed):
        train(model, optimizer, range(2))


def test_a_session_without_a_model_refuses_again_and_can_be_closed(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = zeepo.init(ram="1MiB", disk=tmp_path)
    for _ in range(2):
        with pytest.raises(BudgetError, match="too little"):
            model(torch.ones(1, 3))
    session.close()
    assert session.is_closed
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert type(model.weight) is nn.Parameter
    assert list(tmp_path.iterdir()) == []


def test_units_are_larger_where_ram_has_room_for_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not where they would be what decides whether the budget suffices."""
    monkeypatch.setattr(units, "LARGEST_UNIT_BYTES", 64 << 10)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(128, 96), nn.Linear(96, 128)

    model = nn.Sequential(*[Pair() for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters())
    with zeepo.init(model, optimizer, ram="512MiB", disk=tmp_path) as session:
        assert session.plan.num_units == 12
        least = session.plan.minimum_ram
    with zeepo.init(model, optimizer, ram=least, disk=tmp_path) as session:
        assert session.plan.num_units == 24
        assert session.plan.minimum_ram < least
