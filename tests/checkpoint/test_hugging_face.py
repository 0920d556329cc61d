"""Hugging Face: from_pretrained inside zeepo.lazy, and of a folder that export wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeepo
from tests.faults.small import open_at_minimum
from zeepo.engine.lazy import LazyManager
from zeepo.engine.managed import home_of
from zeepo.memory.disk_tier import STAGING_BYTES
from zeepo.units import KiB

LAZY_RAM = STAGING_BYTES + 256 * KiB


def gpt2() -> Any:
    from transformers import GPT2Config

    sizes = {"n_layer": 4, "n_embd": 60, "n_head": 3, "vocab_size": 401, "n_positions": 16}
    return GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)


def llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=60,
        intermediate_size=121,
        num_hidden_layers=4,
        num_attention_heads=3,
        vocab_size=401,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )


each_config = pytest.mark.parametrize("config", [gpt2, llama], ids=["tied", "untied"])


def new_model(config: Callable[[], Any], seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config())


def pretrained(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    model.train()
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        tokens = torch.randint(0, 401, (2, 8))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_values(model: nn.Module, expected: nn.Module) -> None:
    actual, wanted = model.state_dict(), expected.state_dict()
    assert list(actual) == list(wanted)
    assert [name for name in wanted if not torch.equal(actual[name], wanted[name])] == []


@pytest.mark.parametrize("way", ["from_pretrained", "load_safetensors"])
@pytest.mark.parametrize(
    ("config", "dtype"),
    [(gpt2, torch.float32), (llama, torch.float32), (llama, torch.bfloat16)],
    ids=["tied", "untied", "cast"],
)
def test_pretrained_weights_come_in_lazily_and_train_on(
    config: Callable[[], Any], way: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder, disk = tmp_path / "weights", tmp_path / "disk"
    disk.mkdir()
    new_model(config, 1).save_pretrained(folder, max_shard_size="100KB")
    expected = pretrained(folder, dtype=dtype)
    with zeepo.lazy(ram=LAZY_RAM, disk=disk):
        if way == "from_pretrained":
            model = pretrained(folder, dtype=dtype)
        else:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(config(), dtype=dtype)
    if way == "load_safetensors":
        assert zeepo.load_safetensors(model, folder).missing_keys == []
    home = home_of(model.get_input_embeddings().weight)
    assert home is not None
    assert isinstance(home.manager, LazyManager)
    assert home.manager.store.counters.num_evictions >= 4
    assert all(home_of(p) is not None for p in model.parameters())
    assert_same_values(model, expected)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain_optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    with open_at_minimum(model, optimizer, disk):
        assert train(model, optimizer) == train(expected, plain_optimizer)
        assert_same_values(model, expected)


@each_config
@pytest.mark.parametrize("max_shard_bytes", ["5GB", "100KB"])
def test_from_pretrained_accepts_what_export_wrote(
    config: Callable[[], Any], max_shard_bytes: str, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    model = new_model(config, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path) as session:
        train(model, optimizer)
        session.export(folder, max_shard_bytes=max_shard_bytes)
        model.config.save_pretrained(folder)
    assert (folder / "model.safetensors").exists() == (max_shard_bytes == "5GB")
    again, info = pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_values(again, model)
    is_tied = again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert is_tied == model.config.tie_word_embeddings
