"""Segments: blocks where there are blocks, runs of layers where there are only layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from zeepo.planner.segments import find_segments


class Block(nn.Module):
    """Six layers, like a transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mix, self.project = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4)
        self.norm2, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x


def names(model: nn.Module) -> list[str]:
    return [segment.name for segment in find_segments(model)]


def test_blocks_of_a_transformer() -> None:
    model = Model(*(Block() for _ in range(12)))
    assert names(model) == [f"blocks.{number}" for number in range(12)]
    assert not any(segment.is_run for segment in find_segments(model))


def test_a_block_that_is_there_twice_is_one_segment() -> None:
    block = Block()
    assert names(Model(block, Block(), Block(), Block(), block)).count("blocks.0") == 1


def test_deep_sequential_of_layers_is_cut_into_about_sqrt_runs() -> None:
    model = nn.Sequential(*(layer for _ in range(60) for layer in (nn.Linear(4, 4), nn.Tanh())))
    segments = find_segments(model)
    assert 8 <= len(segments) <= 16
    assert all(segment.is_run for segment in segments)
    assert all(isinstance(segment.modules[0], nn.Linear) for segment in segments)
    assert [m for segment in segments for m in segment.modules] == list(model)


def test_bottlenecks_in_stages() -> None:
    stages = [nn.Sequential(*(Block() for _ in range(count))) for count in (3, 8, 36, 3)]
    segments = find_segments(Model(*stages))
    assert max(len(segment.modules) for segment in segments) <= 4
    assert len(segments) >= 12


def test_a_sequential_with_its_own_forward_is_not_cut() -> None:
    class Backwards(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for module in reversed(self):
                x = module(x)
            return x

    assert names(Backwards(*(nn.Linear(4, 4) for _ in range(30)))) == []


@pytest.mark.parametrize(
    "model",
    [nn.Linear(4, 4), nn.LSTM(4, 4, 3), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential()],
    ids=lambda model: type(model).__name__,
)
def test_nothing_to_save(model: nn.Module) -> None:
    assert names(model) == []


@pytest.mark.parametrize("path", ["blocks.3", "blocks.3.up"])
def test_what_is_left_alone_is_in_no_segment(path: str) -> None:
    model = Model(*(Block() for _ in range(8)))
    alone = model.get_submodule(path)
    segments = find_segments(model, lambda module: module is alone)
    assert [s.name for s in segments] == [f"blocks.{number}" for number in range(8) if number != 3]


def test_what_is_left_alone_ends_a_run() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
    segments = find_segments(model, lambda module: module is model[17])
    inside = [m for segment in segments for m in segment.modules]
    assert model[17] not in inside
    assert len(inside) >= 38


def _trees() -> st.SearchStrategy[nn.Module]:
    leaves = st.sampled_from([nn.Linear, nn.LayerNorm]).map(
        lambda kind: kind(4, 4) if kind is nn.Linear else kind(4)
    ) | st.builds(nn.ReLU)
    return st.recursive(
        leaves,
        lambda children: st.one_of(
            st.lists(children, min_size=1, max_size=6).map(lambda found: nn.Sequential(*found)),
            st.lists(children, min_size=1, max_size=6).map(lambda found: Model(*found)),
        ),
        max_leaves=40,
    )


@given(_trees())
def test_segments_are_disjoint_and_never_the_model(model: nn.Module) -> None:
    inside: list[int] = []
    for segment in find_segments(model):
        assert segment.modules != (model,)
        inner = [m for module in segment.modules for m in module.modules()]
        assert len(inner) >= 2
        inside += map(id, inner)
    assert len(inside) == len(set(inside))
