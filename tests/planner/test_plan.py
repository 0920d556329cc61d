"""The bill of a plan: never less than what is in RAM at once, and no more than everything."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from zeepo.planner.plan import (
    ACTIVATION_BYTES,
    IN_MOTION_BYTES,
    PAGE_BYTES,
    SLACK_SHARE,
    TORCH_GROWTH_BYTES,
    Footprint,
    Plan,
    UnitPlan,
)
from zeepo.units import GiB, format_bytes

KINDS = ("params", "grads", "optimizer_state")
MiB = 1 << 20

unit_plans = st.builds(
    lambda name, size, share: UnitPlan(name, size, int(size * share), size),
    st.text("abc", min_size=1, max_size=4),
    st.integers(0, 200_000),
    st.sampled_from([0.0, 0.5, 1.0]),
)
placements = st.fixed_dictionaries({kind: st.sampled_from(["ram", "disk"]) for kind in KINDS})
plans = st.builds(
    Plan,
    units=st.lists(unit_plans, max_size=6).map(tuple),
    num_states=st.integers(0, 3),
    placement=placements,
    ram=st.integers(0, 1 << 30),
    staging_bytes=st.sampled_from([0, 8 * MiB]),
    piece_bytes=st.integers(1, 300_000),
    region_bytes=st.sampled_from([0, 50_000]),
)


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@given(plans)
def test_the_minimum_is_the_bill(plan: Plan) -> None:
    assert plan.minimum_ram == sum(plan.items().values())
    assert plan.minimum_ram >= TORCH_GROWTH_BYTES
    assert plan.managed_bytes == plan.ram - plan.reserve
    assert plan.num_units == len(plan.units)
    assert all(nbytes >= 0 for nbytes in plan.items().values())


@given(plans)
def test_staging_is_paid_only_with_a_disk(plan: Plan) -> None:
    uses_disk = "disk" in plan.placement.values()
    assert plan.items().get("staging") == (plan.staging_bytes if uses_disk else None)


@given(plans)
def test_what_rests_in_ram_is_paid_in_full(plan: Plan) -> None:
    items = plan.items()
    params = sum(pages(u.param_bytes) for u in plan.units)
    grads = sum(pages(u.trainable_bytes) for u in plan.units)
    if plan.placement["params"] == "ram":
        assert items["params"] == params
    if plan.placement["grads"] == "ram":
        assert items["grads"] == grads
    if plan.placement["optimizer_state"] == "ram":
        assert items["optimizer state"] == grads * plan.num_states


@given(plans)
def test_each_units_step_fits(plan: Plan) -> None:
    """One chunk's parameters, its gradients and a piece of its states, at once."""
    total = sum(plan.items().values())
    for unit in plan.units:
        grads = pages(unit.trainable_bytes)
        piece = min(grads, pages(plan.piece_bytes)) * plan.num_states
        assert total >= pages(unit.param_bytes) + grads + piece


@given(plans)
def test_a_frozen_unit_fits_when_it_is_unfrozen_later(plan: Plan) -> None:
    down = replace(plan, placement=dict.fromkeys(KINDS, "disk"))
    for unit in down.units:
        whole = pages(unit.param_bytes)
        piece = min(whole, pages(plan.piece_bytes)) * plan.num_states
        assert sum(down.items().values()) >= 2 * whole + piece


@given(plans)
def test_two_units_and_a_gradient_are_guaranteed_for_backward(plan: Plan) -> None:
    grads = max((pages(u.trainable_bytes) for u in plan.units), default=0)
    for i, first in enumerate(plan.units):
        for second in plan.units[i + 1 :]:
            together = pages(first.param_bytes) + pages(second.param_bytes) + grads
            assert plan.guaranteed_bytes >= together


@given(plans)
def test_what_a_batch_needs_is_paid(plan: Plan) -> None:
    footprint = Footprint(190 * MiB, 30 * MiB, 160 * MiB, 170 * MiB, 10 * MiB, "aten::mm with a")
    known = replace(plan, footprint=footprint)
    in_ram = sum(known._resting(known._in_ram()).values())
    assert known.minimum_ram >= TORCH_GROWTH_BYTES + 190 * MiB + in_ram
    assert known.minimum_ram >= plan.minimum_ram
    assert "aten::mm with a" in known.explain()
    spilled = replace(known, activations="disk")
    in_motion = spilled.items()["activations"] - known.items()["activations"]
    assert in_motion == IN_MOTION_BYTES
    trifle = Footprint(40 * MiB, 0, 40 * MiB, 40 * MiB, 10 * MiB, "aten::mm with a")
    assert replace(plan, footprint=trifle).minimum_ram == plan.minimum_ram


@given(plans)
def test_what_stays_in_ram_has_room_beside_an_update(plan: Plan) -> None:
    kept = 300 * MiB
    footprint = Footprint(MiB, 0, MiB, kept, 0, "aten::mm with a", kept)
    known = replace(plan, footprint=footprint, activations="disk")
    if known.units:
        assert known._updating(known._in_ram())["activations"] >= kept
    assert replace(known, activations="ram").minimum_ram == plan.minimum_ram


@given(plans)
def test_a_region_that_runs_whole_fits(plan: Plan) -> None:
    if plan.placement["params"] == "disk":
        grads = max((pages(u.trainable_bytes) for u in plan.units), default=0)
        assert sum(plan.items().values()) >= pages(plan.region_bytes) + grads


@given(plans.filter(lambda plan: len(plan.units) >= 2), st.sampled_from(KINDS))
def test_moving_a_kind_down_costs_staging_at_most(plan: Plan, kind: str) -> None:
    units = tuple(replace(u, trainable_bytes=u.param_bytes) for u in plan.units)
    up = replace(plan, units=units, placement={**plan.placement, kind: "ram"}, region_bytes=0)
    down = replace(up, placement={**plan.placement, kind: "disk"})
    # Kept apart, a gradient on its way and new states are there twice.
    twice = max(u.param_bytes + PAGE_BYTES for u in units) * (1 + plan.num_states)
    assert down.minimum_ram <= up.minimum_ram + (plan.staging_bytes + twice) * (1 + SLACK_SHARE) + 1


@given(plans, st.integers(1, 300_000))
def test_smaller_pieces_never_need_more(plan: Plan, piece_bytes: int) -> None:
    smaller = replace(plan, piece_bytes=min(piece_bytes, plan.piece_bytes))
    assert smaller.minimum_ram <= plan.minimum_ram


@given(plans)
def test_the_minimum_does_not_depend_on_the_budget(plan: Plan) -> None:
    assert replace(plan, ram=plan.ram + 12345).minimum_ram == plan.minimum_ram


def example(**changes: object) -> Plan:
    plan = Plan(
        units=(
            UnitPlan("a", 4000, 4000, 4000),
            UnitPlan("b", 9000, 5000, 5000),
            UnitPlan("c", 8000, 0, 8000),
        ),
        num_states=2,
        placement=dict.fromkeys(KINDS, "disk"),
        ram=200 * MiB,
        staging_bytes=8 * MiB,
        piece_bytes=4096,
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def without_slack(plan: Plan) -> dict[str, int]:
    items = plan.items()
    slack = items.pop("slack")
    assert slack == int(SLACK_SHARE * sum(items.values()))
    return items


def test_the_bill_of_an_example() -> None:
    page = PAGE_BYTES
    everything_down = example()
    # Computing: b (3 pages) and c (2), b's gradient as if all of it trained (3).
    # Updating b: 3 + 3 + 2 x 1 = 8 as well.
    assert without_slack(everything_down) == {
        "torch itself": TORCH_GROWTH_BYTES,
        "params": 5 * page,
        "grads": 3 * page,
        "optimizer state": 0,
        "activations": ACTIVATION_BYTES,
        "staging": 8 * MiB,
    }
    assert everything_down.guaranteed_bytes == 8 * MiB + 8 * page
    all_in_ram = example(placement=dict.fromkeys(KINDS, "ram"))
    assert without_slack(all_in_ram) == {
        "torch itself": TORCH_GROWTH_BYTES,
        "params": 6 * page,
        "grads": 3 * page,
        "optimizer state": 6 * page,
        "activations": ACTIVATION_BYTES,
    }
    with_region = example(region_bytes=6 * page)
    assert with_region.items()["params"] == 6 * page
    large = example(units=(UnitPlan("a", 100 * MiB, 100 * MiB, 100 * MiB),), piece_bytes=30 * MiB)
    # Updating: parameters, gradients, two states of a piece, one of them on its way.
    assert without_slack(large) == {
        "torch itself": TORCH_GROWTH_BYTES,
        "params": 100 * MiB,
        "grads": 100 * MiB,
        "optimizer state": 60 * MiB,
        "activations": 30 * MiB,
        "staging": 8 * MiB,
    }


def test_explain_shows_the_bill() -> None:
    plan = example()
    text = plan.explain()
    for part in (plan.minimum_ram, plan.ram, *filter(None, plan.items().values())):
        assert format_bytes(part) in text
    for word in (
        "3 units",
        "params",
        "rest on disk",
        "staging",
        "torch itself",
        "told by the first batch",
    ):
        assert word in text
    listed = text.split("largest units")[1].split()
    assert [w for w in listed if w in "abc"] == ["b", "c", "a"]


def test_explain_advises_recomputing_where_activations_are_most_of_it() -> None:
    advice = 'activations="recompute" may need less'
    large = Footprint(GiB, MiB, GiB - MiB, 0, 0, "aten::mm with a")
    assert advice not in example().explain()
    assert advice in replace(example(), footprint=large).explain()
    recomputing = replace(example(), footprint=large, activations="recompute")
    assert advice not in recomputing.explain()
    assert "are computed again" in recomputing.explain()
