"""state_dict, load_state_dict, torch.save and torch.load in the middle; eval modes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .harness import Observations, Start, case
from .models import LanguageModel, Perceptron, perceptron_loss, tokens, train, train_language


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _through_file(item: Any) -> Any:
    """Save and load as a user does, with torch.load's own safe default."""
    file = io.BytesIO()
    torch.save(item, file)
    file.seek(0)
    return torch.load(file)


@case("save_into_plain_objects")
def save_into_plain_objects(start: Start) -> Observations:
    """What torch.save writes in the middle loads into plain objects, which train on as well."""
    model = LanguageModel(head="tied")
    optimizer = _adamw(model)
    with start(model, optimizer):
        yield from train_language(model, optimizer, range(3))
        saved = _through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        twin = LanguageModel(head="tied")
        own = _adamw(twin)
        twin.load_state_dict(saved["model"])
        own.load_state_dict(saved["optimizer"])
        for step in range(3, 6):
            yield from train_language(model, optimizer, range(step, step + 1))
            yield from train_language(twin, own, range(step, step + 1))
        yield "twin", twin.state_dict()
        yield "saved", saved


@case("load_into_session")
def load_into_session(start: Start) -> Observations:
    """Values and state of a plainly trained twin are loaded in the middle."""
    twin = Perceptron()
    own = torch.optim.AdamW(twin.parameters(), lr=3e-2, weight_decay=0.1)
    list(train(twin, own, range(20, 24)))
    model = Perceptron()
    optimizer = _adamw(model)
    with start(model, optimizer):
        yield from train(model, optimizer, range(3))
        yield "keys", str(model.load_state_dict(_through_file(twin.state_dict())))
        optimizer.load_state_dict(_through_file(own.state_dict()))
        yield from train(model, optimizer, range(3, 7))


@case("load_before_first_step")
def load_before_first_step(start: Start) -> Observations:
    """Resuming: both load before the session's first step."""
    twin = LanguageModel()
    own = _adamw(twin)
    list(train_language(twin, own, range(20, 23)))
    model = LanguageModel()
    optimizer = _adamw(model)
    with start(model, optimizer):
        model.load_state_dict(_through_file(twin.state_dict()))
        optimizer.load_state_dict(_through_file(own.state_dict()))
        yield from train_language(model, optimizer, range(5))


@case("state_dict_round_trip")
def state_dict_round_trip(start: Start) -> Observations:
    """state_dict of both, some steps, and back to it: the same steps give the same losses."""
    model = Perceptron()
    optimizer = _adamw(model)
    with start(model, optimizer):
        yield from train(model, optimizer, range(2))
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        yield from train(model, optimizer, range(2, 5))
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        yield from train(model, optimizer, range(2, 5))
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict(model.state_dict())
        yield from train(model, optimizer, range(5, 7))


@case("partial_load")
def partial_load(start: Start) -> Observations:
    """A part of the weights, not strictly, and one submodule alone."""
    model = Perceptron()
    optimizer = _adamw(model)
    other = Perceptron()
    part = {name: value for name, value in other.state_dict().items() if "middle.1" in name}
    with start(model, optimizer):
        yield from train(model, optimizer, range(2))
        model.load_state_dict(part, strict=False)
        model.middle[3].load_state_dict(other.middle[2].state_dict())
        yield from train(model, optimizer, range(2, 5))
        yield "part", model.middle.state_dict()


@case("best_weights_kept")
def best_weights_kept(start: Start) -> Observations:
    """Early stopping: the best state is cloned when it appears and restored at the end."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    best, kept = float("inf"), None
    with start(model, optimizer):
        for step in range(6):
            yield from train(model, optimizer, range(step, step + 1))
            with torch.no_grad():
                value = float(perceptron_loss(model, 50))
            if value < best:
                best = value
                kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert kept is not None
        model.load_state_dict(kept)
        yield "best", (best, perceptron_loss(model, 50))


@case("optimizer_state_at_init")
def optimizer_state_at_init(start: Start) -> Observations:
    """The optimizer has already stepped when the session begins."""
    model = LanguageModel(head="tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    yield from train_language(model, optimizer, range(3))
    with start(model, optimizer):
        yield from train_language(model, optimizer, range(3, 8))


def _register_evaluations() -> None:
    modes: dict[str, Callable[[], Any]] = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "grad": torch.enable_grad,
    }
    for name, mode in modes.items():

        @case(f"eval_between_steps_{name}")
        def program(start: Start, mode: Callable[[], Any] = mode) -> Observations:
            model = LanguageModel(head="tied", dropout=0.1)
            optimizer = _adamw(model)
            with start(model, optimizer):
                model.eval()
                with mode():
                    before = model(*tokens(50))
                yield "eval", before
                for step in range(5):
                    model.train()
                    yield from train_language(model, optimizer, range(step, step + 1))
                    model.eval()
                    with mode():
                        outs = [model(*tokens(60 + step)), model(tokens(70 + step)[0])]
                    yield "eval", outs


_register_evaluations()


@case("generation_between_steps")
def generation_between_steps(start: Start) -> Observations:
    """Sampling token by token in the middle of training, from torch's random state."""
    model = LanguageModel(head="borrowed")
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(5):
            yield from train_language(model, optimizer, range(step, step + 1))
            text = tokens(80 + step, rows=1, length=3)[0]
            with torch.no_grad():
                for _ in range(4):
                    likely = model(text)[:, -1].softmax(-1)
                    text = torch.cat([text, torch.multinomial(likely, 1)], dim=1)
            yield "text", text


@case("submodule_called_alone")
def submodule_called_alone(start: Start) -> Observations:
    """Parts of the model are called directly, never its root."""
    model = LanguageModel(depth=4)
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(6):
            x, y = tokens(step)
            hidden = model.embed(x) + model.position[: x.shape[1]]
            for block in reversed(model.blocks):
                hidden = block(hidden)
            logits = model.head(model.norm(hidden))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss
