"""Number formats: autocast, gradient scaling, bf16, float64, complex and mixed parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from .harness import Observations, Start, case
from .models import HIDDEN, INPUTS, OUTPUTS, LanguageModel, Perceptron, points, tokens, train


@case("autocast")
def autocast(start: Start) -> Observations:
    """bf16 autocast around the forward, in training and in eval."""
    model = LanguageModel(head="tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(5):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*tokens(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                out = model(tokens(50 + step)[0])
            yield "loss", loss
            yield "eval", out


@case("autocast_checkpointed")
def autocast_checkpointed(start: Start) -> Observations:
    """autocast with checkpointing and a module called twice: its weight cache is used."""
    model = LanguageModel(use_reentrant=False)
    model.blocks[3] = model.blocks[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(5):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*tokens(step))
                loss = loss + model(*tokens(30 + step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("grad_scaler")
def grad_scaler(start: Start) -> Observations:
    """GradScaler on CPU: a step with infinite gradients is skipped and the scale halves."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    with start(model, optimizer):
        for step in range(7):
            x, y = points(step)
            if step in (2, 4):
                x = x * float("inf")
            loss = F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield "loss", loss
            yield "scale", scaler.get_scale()


@case("grad_scaler_clipped")
def grad_scaler_clipped(start: Start) -> Observations:
    """unscale_, then clipping, then the scaler's step; one infinite step."""
    model = LanguageModel(head="tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    with start(model, optimizer):
        for step in range(6):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*tokens(step))
            if step == 3:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield "loss", (loss, norm)
            yield "scale", scaler.get_scale()


@case("grad_scaler_fused")
def grad_scaler_fused(start: Start) -> Observations:
    """With a fused optimizer the scaler hands scale and found_inf to the optimizer itself."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    with start(model, optimizer):
        for step in range(6):
            x, y = points(step)
            loss = F.mse_loss(model(x), y) * (float("inf") if step == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield "loss", loss
            yield "scale", scaler.get_scale()


def _register_dtypes() -> None:
    for name, dtype in (("bfloat16", torch.bfloat16), ("float64", torch.float64)):
        for fused in (False, True):

            @case(f"dtype_{name}{'_fused' if fused else ''}")
            def program(
                start: Start, dtype: torch.dtype = dtype, fused: bool = fused
            ) -> Observations:
                model = Perceptron(dtype=dtype)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
                with start(model, optimizer):
                    for step in range(6):
                        x, y = points(step)
                        loss = F.mse_loss(model(x.to(dtype)), y.to(dtype))
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        yield "loss", loss


_register_dtypes()


class Mixed(nn.Module):
    """Layers of different formats after each other, two in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.narrow = nn.ModuleList(
            nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16) for _ in range(5)
        )
        self.broad = nn.Sequential(
            nn.Linear(HIDDEN, 31, dtype=torch.float64),
            nn.Linear(31, HIDDEN, dtype=torch.float64),
        )
        self.middle = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(5))
        self.gain = nn.Parameter(torch.ones(HIDDEN, dtype=torch.bfloat16))
        self.shift = nn.Parameter(torch.zeros(HIDDEN, dtype=torch.float64))
        self.register_buffer("table", torch.arange(HIDDEN, dtype=torch.int16))
        self.last = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convert between them."""
        x = torch.tanh(self.first(x))
        for narrow, middle in zip(self.narrow, self.middle, strict=True):
            x = torch.tanh(narrow(x.bfloat16()) * self.gain)
            x = torch.tanh(middle(x.float()))
        x = torch.tanh(self.broad(x.double()) + self.shift)
        return self.last(x.float() + self.table)


@case("dtypes_mixed")
def dtypes_mixed(start: Start) -> Observations:
    """bf16, float32 and float64 parameters in one model."""
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from train(model, optimizer, range(6))


class Spectral(nn.Module):
    """Complex weights between Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.weights = nn.ParameterList(
            torch.randn(HIDDEN // 2 + 1, dtype=torch.complex64) for _ in range(4)
        )
        self.mixers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.last = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Filter, mix, repeat."""
        x = torch.tanh(self.first(x))
        for weight, mixer in zip(self.weights, self.mixers, strict=True):
            x = torch.tanh(mixer(torch.fft.irfft(torch.fft.rfft(x) * weight, n=HIDDEN)))
        return self.last(x)


def _register_complex() -> None:
    for name, options in (("single", {"foreach": False}), ("foreach", {"foreach": True})):

        @case(f"dtype_complex_{name}")
        def program(start: Start, options: dict[str, bool] = options) -> Observations:
            model = Spectral()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
            with start(model, optimizer):
                yield from train(model, optimizer, range(6))


_register_complex()
