"""Building inside a budget: the eager constructor's values, bit for bit, in bounded memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import zeepo
from zeepo.engine.lazy import LazyManager
from zeepo.engine.managed import home_of
from zeepo.engine.tuning import tuned
from zeepo.errors import BudgetError, SessionError
from zeepo.memory.disk_tier import STAGING_BYTES
from zeepo.units import KiB, MiB

RAM = STAGING_BYTES + 96 * KiB
"""The disk tier's staging and room for a few of the small models' parameters."""


def perceptron() -> nn.Module:
    model = nn.Sequential(*[nn.Linear(61, 61) for _ in range(8)])

    def reinitialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            module.bias.data.uniform_(-0.1, 0.1)

    return model.apply(reinitialise)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(30, 3, dim_feedforward=61, batch_first=True)
    return nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Embedding(101, 40, padding_idx=3), nn.LSTM(40, 41, 3, batch_first=True))


def normalised() -> nn.Module:
    return nn.Sequential(*[weight_norm(nn.Linear(61, 61)) for _ in range(12)])


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_embd": 60, "n_head": 3, "vocab_size": 101, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=60,
        intermediate_size=121,
        num_hidden_layers=4,
        num_attention_heads=3,
        vocab_size=101,
        bos_token_id=0,
        eos_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config)


BUILDERS = [perceptron, encoder, recurrent, normalised, gpt2, llama]
Builder = Callable[[], nn.Module]


def build_eagerly(builder: Builder) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    return builder(), torch.get_rng_state()


def build_lazily(builder: Builder, disk: Path, ram: int = RAM) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    with zeepo.lazy(ram=ram, disk=disk):
        model = builder()
    return model, torch.get_rng_state()


def manager_of(model: nn.Module) -> LazyManager:
    home = home_of(next(model.parameters()))
    assert home is not None
    assert isinstance(home.manager, LazyManager)
    return home.manager


def assert_same_values(model: nn.Module, expected: nn.Module) -> None:
    actual, wanted = model.state_dict(), expected.state_dict()
    assert list(actual) == list(wanted)
    assert [name for name in wanted if not torch.equal(actual[name], wanted[name])] == []


@pytest.mark.parametrize("builder", BUILDERS)
def test_initial_values_and_random_state_are_the_eager_ones(
    builder: Builder, tmp_path: Path
) -> None:
    expected, state = build_eagerly(builder)
    model, lazy_state = build_lazily(builder, tmp_path)
    store = manager_of(model).store
    assert store.counters.num_evictions >= 4
    assert (store.ledger.peak_bytes or 0) <= RAM
    assert torch.equal(state, lazy_state)
    assert_same_values(model, expected)


@pytest.mark.parametrize("builder", [perceptron, gpt2])
def test_a_session_takes_the_parameters_over(builder: Builder, tmp_path: Path) -> None:
    expected, _ = build_eagerly(builder)
    model, _ = build_lazily(builder, tmp_path)
    view = next(model.parameters()).detach()[1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path)
    least = session.plan.minimum_ram
    session.close()
    assert_same_values(model, expected)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    del view

    model, _ = build_lazily(builder, tmp_path)
    view = next(model.parameters()).detach()[1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    with zeepo.init(model, optimizer, ram=least, disk=tmp_path) as session:
        assert len(list(tmp_path.iterdir())) == 1, "the lazy block's own scratch folder is gone"
        for step in range(3):
            for each, each_optimizer in ((model, optimizer), (expected, plain)):
                loss = sum((p * (step + 1)).square().mean() for p in each.parameters())
                loss.backward()
                each_optimizer.step()
                each_optimizer.zero_grad()
        assert_same_values(model, expected)
        assert torch.equal(view, next(expected.parameters())[1:]), "a view made before init"
        assert session.stats().evictions > 0
    assert list(tmp_path.iterdir()) == []


def test_what_was_replaced_while_building_is_forgotten(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(101, 39), nn.Linear(39, 39), nn.Linear(39, 101))
        model[2].weight = model[0].weight
        return model

    model, _ = build_lazily(tied, tmp_path)
    manager = manager_of(model)
    assert len(manager.homes) == 5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path):
        assert model[2].weight is model[0].weight
        assert manager.homes == {}


def parametrised() -> nn.Module:
    """Parametrizations exchange the memory of the weight they take over."""
    layers = [nn.Linear(61, 61) for _ in range(12)]
    for layer, normalise in zip(layers, (weight_norm, spectral_norm, orthogonal) * 4, strict=True):
        normalise(layer)
    return nn.Sequential(*layers)


def narrowed() -> nn.Module:
    return nn.Sequential(*(nn.Linear(61, 61) for _ in range(9))).to(torch.bfloat16)


@pytest.mark.parametrize("builder", [parametrised, narrowed])
def test_changes_of_what_was_built(builder: Builder, tmp_path: Path) -> None:
    expected, state = build_eagerly(builder)
    model, lazy_state = build_lazily(builder, tmp_path)
    manager = manager_of(model)
    assert manager.store.counters.num_evictions >= 4
    assert all(home_of(p).manager is manager for p in model.parameters())
    assert torch.equal(state, lazy_state)
    assert_same_values(model, expected)
    model.double(), expected.double()  # also after the block
    assert_same_values(model, expected)
    pairs = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, expected)]
    with zeepo.init(*pairs[0], ram="1GiB", disk=tmp_path):
        for each, optimizer in pairs:
            each(torch.ones(2, 61, dtype=torch.float64)).sum().backward()
            optimizer.step()
    assert_same_values(model, expected)
    assert list(tmp_path.iterdir()) == []


def test_gradients_made_before_the_session(tmp_path: Path) -> None:
    pairs = []
    for model in (build_lazily(perceptron, tmp_path)[0], build_eagerly(perceptron)[0]):
        model(torch.ones(2, 61)).sum().backward()
        assert next(model.parameters()).grad is not None
        pairs.append((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    with zeepo.init(*pairs[0], ram="1GiB", disk=tmp_path):
        for _, optimizer in pairs:
            optimizer.step()
    assert_same_values(pairs[0][0], pairs[1][0])
    assert list(tmp_path.iterdir()) == []


def test_a_lazy_model_works_without_a_session(tmp_path: Path) -> None:
    expected, _ = build_eagerly(perceptron)
    model, _ = build_lazily(perceptron, tmp_path)
    x = torch.ones(2, 61)
    assert torch.equal(model(x), expected(x))
    twin = copy.deepcopy(model)
    assert_same_values(twin, expected)
    del model, twin
    gc.collect()
    assert list(tmp_path.iterdir()) == [], "scratch goes with the last tensor"


def test_a_parameter_larger_than_the_budget_is_named(tmp_path: Path) -> None:
    with pytest.raises(BudgetError), zeepo.lazy(ram=RAM, disk=tmp_path):
        nn.Linear(500, 500)
    assert nn.Linear(3, 3).weight.numel() == 9, "registering is torch's own again"


def test_without_a_stated_budget_the_largest_parameter_has_room(tmp_path: Path) -> None:
    with zeepo.lazy(disk=tmp_path):
        model = nn.Linear(9000, 9000, bias=False)
    assert home_of(model.weight) is not None


def test_a_session_without_ram_gets_that_of_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened_with(*lazy_rams: int | None, **options: Any) -> int:
        layers = []
        for ram in lazy_rams:
            with zeepo.lazy(ram=ram, disk=tmp_path):
                layers.append(nn.Linear(5, 5))
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with zeepo.init(model, optimizer, disk=tmp_path, **options) as session:
            return session.plan.ram

    assert opened_with(300 * MiB) == 300 * MiB
    assert opened_with(300 * MiB, 400 * MiB) == 400 * MiB, "the largest"
    assert opened_with(300 * MiB, ram="500MiB") == 500 * MiB, "what init is given wins"
    with tuned(least_ram=True):
        assert opened_with(300 * MiB) < 300 * MiB
    monkeypatch.setenv("ZEEPO_RAM", "600MiB")
    assert opened_with(300 * MiB) == 600 * MiB
    with pytest.raises(BudgetError, match="is too little"):
        opened_with(300 * MiB, ram="1MiB")


def test_a_model_that_is_adopted_brings_the_ram_of_its_block(tmp_path: Path) -> None:
    with zeepo.lazy(ram="300MiB", disk=tmp_path):
        model = nn.Linear(5, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(disk=tmp_path) as session:
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        assert session.plan.ram == 300 * MiB


def test_one_block_at_a_time(tmp_path: Path) -> None:
    with (
        zeepo.lazy(disk=tmp_path),
        pytest.raises(SessionError, match="open already"),
        zeepo.lazy(disk=tmp_path),
    ):
        pass


def test_the_default_directory_is_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that are meant for `init`, which may get its disk as a keyword, are no error."""
    monkeypatch.delenv("ZEEPO_DISK", raising=False)
    monkeypatch.setenv("ZEEPO_ACTIVATIONS", "disk")
    with zeepo.lazy():
        nn.Linear(4, 4)
