"""The five models of the budget benchmark, with their batches, built inside or outside a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from torch import Tensor, nn


@dataclass(frozen=True)
class Job:
    """How to build a model and what one step's loss is."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], Tensor]
    activations: str = "auto"


def _gpt() -> nn.Module:
    return GPT(GPTConfig(num_layers=24, width=1024, num_heads=16, checkpointing=True))


def _gpt_loss(model: nn.Module, random: torch.Generator) -> Tensor:
    tokens = torch.randint(50304, (1, 257), generator=random)
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return loss


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=8,
        use_cache=False,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-any-return]


def _llama_loss(model: nn.Module, random: torch.Generator) -> Tensor:
    tokens = torch.randint(32000, (1, 256), generator=random)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(60):
        layers += [nn.Linear(2048, 2048), nn.Tanh()]
    return nn.Sequential(*layers)


def _mlp_loss(model: nn.Module, random: torch.Generator) -> Tensor:
    rows = torch.randn(64, 2048, generator=random)
    out: Tensor = model(rows)
    return F.mse_loss(out, rows)


class Bottleneck(nn.Module):
    """A residual block of ResNet-50 and deeper."""

    def __init__(self, channels_in: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        out = self.norm3(self.conv3(out))
        out += self.shortcut(x)
        return self.relu(out)  # type: ignore[no-any-return]


class ResNet152(nn.Module):
    """The shape of ResNet-152: 3, 8, 36 and 3 blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        channels = 64
        stages: list[nn.Module] = []
        for stage, num_blocks in enumerate((3, 8, 36, 3)):
            width = 64 << stage
            for block in range(num_blocks):
                stages.append(Bottleneck(channels, width, 2 if stage and not block else 1))
                channels = 4 * width
        self.blocks = nn.ModuleList(stages)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def _cnn_loss(model: nn.Module, random: torch.Generator) -> Tensor:
    images = torch.randn(16, 3, 224, 224, generator=random)
    return F.cross_entropy(model(images), torch.randint(1000, (16,), generator=random))


class LSTM(nn.Module):
    """Six recurrent layers of 1024 and a vocabulary of 10,000: 70M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10000, 1024)
        self.lstm = nn.LSTM(1024, 1024, num_layers=6, batch_first=True)
        self.head = nn.Linear(1024, 10000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0])  # type: ignore[no-any-return]


def _lstm_loss(model: nn.Module, random: torch.Generator) -> Tensor:
    tokens = torch.randint(10000, (16, 65), generator=random)
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


JOBS = {
    "gpt": Job(_gpt, _gpt_loss),
    "llama": Job(_llama, _llama_loss),
    "mlp": Job(_mlp, _mlp_loss),
    "cnn": Job(ResNet152, _cnn_loss),
    "lstm": Job(LSTM, _lstm_loss),
}
