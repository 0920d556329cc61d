"""torch.compile around the model, before init and after it."""

from __future__ import annotations

import torch

from .harness import Observations, Start, case
from .models import LanguageModel, Perceptron, tokens, train

FEW = ("disk", "params_ram")  # compiling takes longer than training


@case("compile_aot_eager_before_init", compiles=True, whole=True, placements=FEW)
def compile_aot_eager_before_init(start: Start) -> Observations:
    """Compiled before init; the session gets the model inside."""
    model = Perceptron()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from train(compiled, optimizer, range(6))


@case("compile_aot_eager_after_init", compiles=True, whole=True, placements=FEW)
def compile_aot_eager_after_init(start: Start) -> Observations:
    """Compiled inside the session, with eval between the steps."""
    model = LanguageModel(depth=2, head="tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        compiled = torch.compile(model, backend="aot_eager")
        for step in range(5):
            loss = compiled(*tokens(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                out = model(*tokens(50 + step))
            yield "loss", (loss, out)


@case("compile_wrapper_given", compiles=True, placements=FEW)
def compile_wrapper_given(start: Start) -> Observations:
    """The compiled wrapper itself is what the session gets."""
    compiled = torch.compile(Perceptron(), backend="aot_eager")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    with start(compiled, optimizer):
        yield from train(compiled, optimizer, range(6))


@case("compile_per_block", compiles=True, placements=FEW)
def compile_per_block(start: Start) -> Observations:
    """Only the blocks are compiled, in place."""
    model = LanguageModel()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(5):
            loss = model(*tokens(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("compile_inductor", compiles=True, whole=True, slow=True, placements=("disk",))
def compile_inductor(start: Start) -> Observations:
    """The default backend, which writes and builds C++."""
    model = Perceptron()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from train(compiled, optimizer, range(5))
