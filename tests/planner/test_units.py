"""Units partition the parameters; blocks of a list are apart, small modules stay whole."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zeepo.planner import units as units_module
from zeepo.planner.units import LARGEST_UNIT_BYTES, Unit, find_units, largest_unit_bytes


class Node(nn.Module):
    """A module with parameters of its own, of given lengths, and children."""

    def __init__(self, lengths: list[int], children: list[nn.Module]) -> None:
        super().__init__()
        for number, length in enumerate(lengths):
            setattr(self, f"p{number}", nn.Parameter(torch.zeros(length)))
        for number, child in enumerate(children):
            setattr(self, f"child{number}", child)


def _lists(children: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
    return st.lists(children, max_size=3).map(nn.ModuleList)


trees: st.SearchStrategy[nn.Module] = st.recursive(
    st.builds(Node, st.lists(st.integers(0, 40), max_size=2), st.just([])),
    lambda inner: st.one_of(
        st.builds(Node, st.lists(st.integers(0, 40), max_size=2), st.lists(inner, max_size=3)),
        _lists(inner),
    ),
    max_leaves=8,
)


def tie(model: nn.Module, data: st.DataObject) -> None:
    """Let some modules share a parameter."""
    owners = [(m, n) for m in model.modules() for n, _ in m.named_parameters(recurse=False)]
    for _ in range(data.draw(st.integers(0, 2)) if len(owners) > 1 else 0):
        (source, a), (target, b) = (
            data.draw(st.sampled_from(owners)),
            data.draw(st.sampled_from(owners)),
        )
        setattr(target, b, getattr(source, a))


@given(trees, st.data(), st.sampled_from([60, 200, 32 << 20]))
def test_units_partition_the_parameters(tree: nn.Module, data: st.DataObject, most: int) -> None:
    model = Node([3], [tree])
    tie(model, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units_module, "LARGEST_UNIT_BYTES", most)
        units = find_units("", model)
    found = [id(p) for unit in units for _, p in unit.parameters]
    assert sorted(found) == sorted({id(p) for p in model.parameters()})
    names = dict(model.named_parameters(remove_duplicate=False))
    for unit in units:
        assert unit.parameters
        assert all(names[name] is p for name, p in unit.parameters)
        if any(p.nbytes > most for _, p in unit.parameters):
            assert len(unit.parameters) == 1, "a parameter past the limit is a unit of its own"


@given(trees)
def test_no_unit_holds_two_blocks_of_a_list(tree: nn.Module) -> None:
    model = Node([3], [tree])
    units = find_units("", model)
    home = {id(p): i for i, unit in enumerate(units) for _, p in unit.parameters}
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            blocks = [{home[id(p)] for p in child.parameters()} for child in module]
            for number, block in enumerate(blocks):
                assert all(block.isdisjoint(other) for other in blocks[number + 1 :])


@given(trees, st.data())
def test_units_of_several_modules_stay_below_the_share(
    tree: nn.Module, data: st.DataObject
) -> None:
    """A unit over the share of the model is the direct parameters of one module."""
    model = Node([3], [tree])
    total = sum(p.nbytes for p in model.parameters())
    for unit in find_units("", model):
        owners = {name.rpartition(".")[0] for name, _ in unit.parameters}
        if len(owners) > 1:
            assert unit.nbytes <= max(1, total // units_module.SHARE_OF_MODEL)


def names(units: list[Unit]) -> list[tuple[str, list[str]]]:
    return [(u.name, [n for n, _ in u.parameters]) for u in units]


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_have_one_home() -> None:
    assert names(find_units("", Tied())) == [
        ("embed", ["embed.weight"]),
        *[(f"blocks.{i}", [f"blocks.{i}.weight", f"blocks.{i}.bias"]) for i in range(3)],
    ]


def test_a_name_goes_before_everything() -> None:
    units = find_units("generator", Tied())
    assert all(u.name.startswith("generator.") for u in units)
    assert units[0].parameters[0][0] == "generator.embed.weight"


def test_a_leaf_model_is_one_unit_named_by_its_class() -> None:
    assert names(find_units("", nn.Linear(2, 2))) == [("Linear", ["weight", "bias"])]


def test_a_small_module_with_children_stays_whole() -> None:
    small = Node([], [nn.Linear(2, 2), nn.Linear(2, 2)])
    model = nn.Sequential(small, *(nn.Linear(8, 8) for _ in range(8)))
    found = names(find_units("", model))
    assert found[0] == ("0", [f"0.child{i}.{n}" for i in range(2) for n in ("weight", "bias")])
    assert len(found) == 9


def test_a_large_module_is_taken_apart_and_what_it_owns_is_a_unit() -> None:
    large = Node([5], [nn.Linear(8, 8), nn.Linear(8, 8)])
    model = Node([], [large, nn.Linear(8, 8)])
    assert [u.name for u in find_units("", model)] == [
        "child0",
        "child0.child0",
        "child0.child1",
        "child1",
    ]


def test_neighbours_that_fit_together_are_one_unit() -> None:
    """A norm moves with its neighbours; what would not fit begins the next unit."""
    block = Node([], [nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 16)])
    model = nn.Sequential(*(deepcopy(block) for _ in range(4)))
    limit = sum(p.nbytes for p in model.parameters()) // units_module.SHARE_OF_MODEL
    assert names(find_units("", model))[:2] == [
        (
            "0.child0..child2",
            [f"0.child{i}.{n}" for i in range(3) for n in ("weight", "bias")],
        ),
        ("0.child3", ["0.child3.weight", "0.child3.bias"]),
    ]
    assert all(unit.nbytes <= limit for unit in find_units("", model) if ".." in unit.name)


def test_neighbours_that_share_a_weight_have_it_once() -> None:
    model = Node([], [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 200)])
    model.child1.weight = model.child0.weight
    found = names(find_units("", model))
    assert found[0] == ("child0..child1", ["child0.weight", "child0.bias", "child1.bias"])


def test_blocks_of_a_list_are_not_joined() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
    assert len(find_units("", model)) == 20


def test_an_expert_list_is_apart_however_small() -> None:
    moe = Node([], [nn.ModuleList(nn.Linear(1, 1) for _ in range(2))])
    model = Node([], [moe, *(nn.Linear(30, 30) for _ in range(9))])
    assert [u.name for u in find_units("", model)][:2] == ["child0.child0.0", "child0.child0.1"]


def test_a_list_of_one_block_is_no_repetition() -> None:
    big = [nn.Linear(30, 30) for _ in range(3)]
    model = Node([], [nn.Sequential(nn.Linear(1, 1), nn.ReLU()), *big])
    assert find_units("", model)[0].name == "child0"


def test_a_parameter_past_the_limit_is_a_unit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units_module, "LARGEST_UNIT_BYTES", 100)
    found = names(find_units("", nn.Linear(8, 8)))
    assert found == [("Linear", ["bias"]), ("weight", ["weight"])]


def test_taken_parameters_belong_to_the_first_model() -> None:
    """Two models that share a module: the second gets only what is left, and says what it took."""
    shared = nn.Linear(3, 3)
    first, second = Node([], [shared, nn.Linear(2, 2)]), Node([], [shared, nn.Linear(4, 4)])
    taken: set[int] = set()
    find_units("first", first, taken)
    units = find_units("second", second, taken)
    assert [u.name for u in units] == ["second.child1"]
    assert taken == {id(p) for m in (first, second) for p in m.parameters()}


def test_a_model_without_parameters_has_no_units() -> None:
    assert find_units("", nn.Sequential(nn.ReLU(), nn.Tanh())) == []


def test_a_block_is_one_unit_where_the_budget_has_room_for_many() -> None:
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)) for _ in range(12)]
    model = nn.ModuleList(nn.ModuleDict({"a": b[0], "b": b[1]}) for b in blocks)
    assert len(find_units("", model)) == 24
    assert len(find_units("", model, largest_bytes=64 << 20)) == 24  # blocks of a list are apart
    wide = nn.ModuleList(Node([], [b[0], b[1]]) for b in blocks)
    assert len(find_units("", wide)) == 24
    assert len(find_units("", wide, largest_bytes=64 << 20)) == 12


def test_how_large_a_unit_may_be() -> None:
    assert largest_unit_bytes(None, 1) == LARGEST_UNIT_BYTES
    assert largest_unit_bytes(512 << 20, 1) == LARGEST_UNIT_BYTES
    assert largest_unit_bytes(1536 << 20, 1) == 64 << 20
    assert largest_unit_bytes(1 << 40, 1) == 128 << 20
    assert largest_unit_bytes(1 << 40, 2) == LARGEST_UNIT_BYTES  # another may have less


def test_what_a_module_owns_is_several_units_where_it_is_large() -> None:
    with torch.device("meta"):
        model = nn.ParameterList(nn.Parameter(torch.empty(5 << 20)) for _ in range(20))
    for limit_mib, counts in ((32, [1] * 20), (128, [6, 6, 6, 2])):
        found = find_units("", model, largest_bytes=limit_mib << 20)
        assert [len(unit.parameters) for unit in found] == counts
        assert len({unit.name for unit in found}) == len(found)
