"""A recomputed segment gives the bits of a kept one, whatever its forward does besides computing.

Every model here has blocks with something awkward in them. It trains plainly and with
activations="recompute"; losses, gradients, parameters, buffers and random states must agree, and
the blocks must really have been recomputed.
"""

from __future__ import annotations

import copy
import io
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import zeepo
from zeepo.errors import UnsupportedError

WIDTH = 8
forwards: list[str] = []
"""One entry for each run of a block's forward: the plain ones and the recomputations."""


class Block(nn.Module):
    """Two layers; subclasses add what is awkward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        forwards.append(type(self).__name__)
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A stack of blocks between two layers."""

    def __init__(self, kind: Callable[[], nn.Module], depth: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(kind() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x).square().mean()

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


Step = Callable[[nn.Module, Tensor], Any]


def simple_step(model: nn.Module, x: Tensor) -> Any:
    loss = model(x)
    loss.backward()
    return loss.detach()


def observe(
    build: Callable[[], nn.Module], step: Step, num_steps: int, **options: Any
) -> tuple[list[Any], nn.Module]:
    """Everything that training shows."""
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = zeepo.init(model, optimizer, **options) if options else None
    seen: list[Any] = []
    for number in range(num_steps):
        seen.append(step(model, torch.randn(5, 3, generator=torch.Generator().manual_seed(number))))
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        session.close()
    seen += [value.clone() for value in model.state_dict().values()]
    seen += [torch.get_rng_state(), str(random.getstate()), str(numpy.random.get_state())]
    return seen, model


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


def check(
    build: Callable[[], nn.Module],
    step: Step = simple_step,
    *,
    num_steps: int = 3,
    recomputes: bool = True,
) -> tuple[nn.Module, nn.Module]:
    """Train both ways and compare; returns both models."""
    forwards.clear()
    plain_seen, plain = observe(build, step, num_steps)
    num_forwards = len(forwards)
    forwards.clear()
    seen, model = observe(build, step, num_steps, ram="1GiB", activations="recompute")
    assert_same(plain_seen, seen)
    if recomputes:
        assert len(forwards) > num_forwards > 0, "nothing was recomputed"
    else:
        assert len(forwards) == num_forwards, "something was recomputed"
    return plain, model


# -- random numbers and state ----------------------------------------------------------------------


class Random(Block):
    """Draws from every generator there is, its own included."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.python = random.Random(4)
        self.numpy = numpy.random.default_rng(5)

    def inner(self, x: Tensor) -> Tensor:
        x = super().inner(x) * random.random() * numpy.random.rand() * self.numpy.random()
        x = x * torch.rand(WIDTH, generator=self.generator) * self.python.random()
        return torch.tanh(nn.functional.dropout(x, 0.3))


def test_random_numbers() -> None:
    check(lambda: Net(Random))


class Normalised(Block):
    """BatchNorm with a cumulative average, and a buffer that is changed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("large", torch.zeros(1 << 15))
        self.register_buffer("table", torch.ones(1 << 15))

    def inner(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.large[:WIDTH] += self.mean
        return super().inner(self.norm(x) + self.large[:WIDTH] * self.table[0]).sin()


def test_buffers_change_once() -> None:
    check(lambda: Net(Normalised))


def test_buffers_in_evaluation() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        model.eval()
        first = model(x)
        model.train()
        second = model(x + 1)
        (first + second).backward()
        return first.detach(), second.detach()

    check(lambda: Net(Normalised), step)


class Stateful(Block):
    """Counts, remembers, and computes with what it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log, self.table = 0, [], {"scale": 1.0}
        self.counter = torch.zeros(())
        self.hidden = torch.zeros(WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(self.calls)
        self.table["scale"] *= 1.1
        self.counter += 1
        x = super().inner(x + self.hidden) * self.table["scale"] * len(self.log) * self.counter
        self.hidden = x.detach().mean(0)
        self.auxiliary = x.square().mean()
        return x.sin()


def test_attributes_change_once() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        loss = model(x) + sum(block.auxiliary for block in model.blocks)
        loss.backward()
        return loss.detach()

    plain, model = check(lambda: Net(Stateful), step)
    for left, right in zip(plain.blocks, model.blocks, strict=True):
        assert left.calls == right.calls == 3
        assert left.log == right.log
        assert left.table == right.table
        assert torch.equal(left.hidden, right.hidden)


def parametrised(register: Callable[..., Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        block = Block()
        register(block.up)
        return block

    return build


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize(
    "register",
    [spectral_norm, weight_norm, parametrizations.spectral_norm, parametrizations.weight_norm],
    ids=lambda register: f"{register.__module__}.{register.__name__}",
)
def test_parametrised_weights(register: Callable[..., Any]) -> None:
    check(lambda: Net(parametrised(register)))


# -- arguments and results -------------------------------------------------------------------------


class InPlace(Block):
    """Changes its input."""

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x.mul_(0.5)).sin()


def test_input_changed_in_place() -> None:
    check(lambda: Net(InPlace))


def test_input_changed_in_place_only_later() -> None:
    class Sometimes(InPlace):
        def inner(self, x: Tensor) -> Tensor:
            return super().inner(x if x.shape[0] == 4 else x.clone())

    model = Net(Sometimes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(model, optimizer, ram="1GiB", activations="recompute"):
        model(torch.randn(5, 3)).backward()
        with pytest.raises(UnsupportedError, match=r"blocks\.0 changed its input in place"):
            model(torch.randn(4, 3))


class TwoViews(Block):
    """Gets two views of the same memory and changes one of them."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        forwards.append("TwoViews")
        assert y is not None
        y.mul_(0.5)
        return x.sin() + self.inner(x)


class GivesTwoViews(Net):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        x = x.clone()
        return block(x.view(-1, WIDTH), y=x.detach())


def test_arguments_that_share_memory_and_are_changed() -> None:
    check(lambda: GivesTwoViews(TwoViews), recomputes=False)


@dataclass
class Cache:
    """Like the cache of a language model: filled by the blocks as they run."""

    entries: list[Tensor] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)


class Caching(Block):
    """Looks at the cache, fills it, and returns a dict."""

    def forward(self, x: Tensor, *, cache: Cache, options: dict[str, Any]) -> dict[str, Any]:
        forwards.append("Caching")
        cache.entries.append(self.up(x))
        cache.seen["calls"] = cache.seen.get("calls", 0) + 1
        options["depth"] = options.get("depth", 0) + 1
        mixed = torch.stack(cache.entries).mean(0).sin() * cache.seen["calls"] * options["depth"]
        return {"hidden": x + self.down(mixed.tanh()), "number": len(cache.entries), "none": None}


class WithCache(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.cache, options = Cache(), {}
        x = self.first(x)
        for block in self.blocks:
            out = block(x, cache=self.cache, options=options)
            x = out["hidden"] * out["number"]
        return self.last(x).square().mean()


def test_objects_among_the_arguments() -> None:
    plain, model = check(lambda: WithCache(Caching))
    assert len(plain.cache.entries) == len(model.cache.entries) == 4
    assert plain.cache.seen == model.cache.seen


class Consuming(Block):
    def forward(self, x: Tensor, numbers: Iterator[float]) -> Tensor:
        forwards.append("Consuming")
        return x + self.inner(x) * next(numbers)


class GivesIterator(Net):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x, iter([2.0]))


def test_an_argument_that_cannot_be_kept() -> None:
    check(lambda: GivesIterator(Consuming), recomputes=False)


# -- autograd --------------------------------------------------------------------------------------


class Twice(torch.autograd.Function):
    """Reads what it saved twice; that is allowed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]


class ReadsTwice(Block):
    def inner(self, x: Tensor) -> Tensor:
        return Twice.apply(self.up(x).sin(), self.up(x).cos()) @ self.down.weight.t()


def test_saved_tensors_read_twice() -> None:
    check(lambda: Net(ReadsTwice))


class Differentiates(Block):
    """Computes a gradient in its forward and goes on with it."""

    def inner(self, x: Tensor) -> Tensor:
        y = super().inner(x).sin()
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + gradient.cos()


def test_gradient_inside_forward() -> None:
    check(lambda: Net(Differentiates))


def test_retain_graph_and_partial_backwards() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        loss = model(x)
        loss.backward(retain_graph=True)
        some = torch.autograd.grad(loss, [model.first.weight], retain_graph=True)
        loss.backward()
        return loss.detach(), some

    check(lambda: Net(Normalised), step)


def test_double_backward() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
        loss = gradient.square().sum() + model(x)
        loss.backward()
        return loss.detach(), x.grad

    check(lambda: Net(Random), step)


def test_flags_changed_between_forward_and_backward() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        for p in model.blocks[1].parameters():
            p.requires_grad_(False)
        loss = model(x)
        for p in model.blocks[1].parameters():
            p.requires_grad_(True)
        model.eval()
        loss.backward()
        model.train()
        return loss.detach()

    check(lambda: Net(Normalised), step)


def test_functional_call() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        other = {name: p * 1.5 for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, other, (x,))
        loss.backward()
        return loss.detach()

    check(lambda: Net(Normalised), step)


def test_settings_of_the_forward_are_those_of_the_recomputation() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        with (
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            torch.autocast("cpu", torch.bfloat16),
        ):
            loss = model(x)
        loss.backward()
        return loss.detach()

    class Attending(Block):
        def inner(self, x: Tensor) -> Tensor:
            x = x[None, None]
            return nn.functional.scaled_dot_product_attention(x, x, x)[0, 0] + super().inner(
                x[0, 0]
            )

    check(lambda: Net(Attending), step)


class Careless(Block):
    """Catches every error."""

    def inner(self, x: Tensor) -> Tensor:
        try:
            return super().inner(x)
        except Exception:
            return x


def test_recomputation_ends_early_unseen_by_the_user() -> None:
    check(lambda: Net(Careless))


@pytest.mark.parametrize("what", ["input", "parameter"])
def test_changed_between_forward_and_backward_is_refused(what: str) -> None:
    class Keeps(Net):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            self.kept = x * 1.0
            return block(self.kept)

    class Sine(Block):
        def inner(self, x: Tensor) -> Tensor:  # plain autograd needs neither the input nor the bias
            return ((x + self.up.bias[:WIDTH]) * 2).sin()

    model = Keeps(Sine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(model, optimizer, ram="1GiB", activations="recompute"):
        loss = model(torch.randn(5, 3))
        with torch.no_grad():
            (model.kept if what == "input" else model.blocks[3].up.bias).add_(1.0)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*blocks\.3"):
            loss.backward()


def test_forward_that_depends_on_a_global_is_refused() -> None:
    depth = [1]

    class Deep(Block):
        def inner(self, x: Tensor) -> Tensor:
            for _ in range(depth[0]):
                x = super().inner(x).sin()
            return x

    model = Net(Deep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(model, optimizer, ram="1GiB", activations="recompute"):
        loss = model(torch.randn(5, 3))
        depth[0] = 0
        with pytest.raises(UnsupportedError, match=r"blocks\.3 did something else"):
            loss.backward()


def test_forward_that_changes_its_parameter_is_refused() -> None:
    class Writes(Block):
        def inner(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.bias.add_(1.0)
            return super().inner(x)

    model = Net(Writes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        zeepo.init(model, optimizer, ram="1GiB", activations="recompute"),
        pytest.raises(UnsupportedError, match=r"blocks\.0 changes its own parameter"),
    ):
        model(torch.randn(5, 3))


# -- hooks, classes, sequences ---------------------------------------------------------------------


def test_hooks_fire_once() -> None:
    calls: list[str] = []

    def build() -> nn.Module:
        model = Net(Block)
        model.blocks[0].register_forward_hook(lambda *_: calls.append("block"))
        model.blocks[1].up.register_forward_hook(lambda *_: calls.append("inside"))
        model.blocks[2].up.register_full_backward_hook(lambda *_: calls.append("backward"))
        return model

    check(build)
    for name in ("block", "inside", "backward"):
        assert calls.count(name) == 2 * 3


def test_explained() -> None:
    model = Net(Block)
    model.blocks[1].up.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(model, optimizer, ram="1GiB", activations="recompute") as session:
        model(torch.randn(5, 3)).backward()
        text = session._recompute.explain()
    assert "4 segments are recomputed" in text
    assert "blocks.1: not recomputed, a Linear in it has forward hooks" in text
    assert "blocks.2" not in text


def test_nothing_is_left_on_classes_copies_and_files(tmp_path: Path) -> None:
    forward = Block.forward
    model = Net(Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(model, optimizer, ram="1GiB", activations="recompute"):
        assert Block.forward is not forward
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        forwards.clear()
        twin(torch.randn(5, 3)).backward()
        assert len(forwards) == 4, "the copy is not the session's"
        assert "forward" not in vars(model.blocks[0])
    assert Block.forward is forward
    with pytest.raises(MemoryError):
        zeepo.init(model, optimizer, ram="1MiB", activations="recompute")
    assert Block.forward is forward


def test_graph_outlives_the_session() -> None:
    torch.manual_seed(0)
    model = Net(Normalised)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 3)
    with zeepo.init(model, optimizer, ram="1GiB", activations="recompute"):
        loss = model(x)
    loss.backward()
    plain(x).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def layers(*, inplace: bool) -> nn.Module:
    class Counting(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            forwards.append("layer")
            return super().forward(x)

    found: list[nn.Module] = [nn.Linear(3, WIDTH)]
    for _ in range(12):
        found += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Counting(inplace)]
        found += [nn.Dropout(0.2)]
    return nn.Sequential(*found)


@pytest.mark.parametrize("inplace", [False, True])
def test_sequential_of_layers(inplace: bool) -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    check(lambda: layers(inplace=inplace), step)


def test_sequential_that_grows_in_the_session() -> None:
    model = layers(inplace=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(model, optimizer, ram="1GiB", activations="recompute"):
        model.append(nn.Linear(WIDTH, 1))
        assert model(torch.randn(5, 3)).shape == (5, 1)


def test_the_users_own_checkpointing_is_left_to_them() -> None:
    class Checkpointed(Net):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    model = Checkpointed(Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(model, optimizer, ram="1GiB", activations="recompute"):
        forwards.clear()
        model(torch.randn(5, 3)).backward()
    assert len(forwards) == 8, "twice each, not three times"


def test_no_gradients_no_recomputation() -> None:
    model = Net(Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(model, optimizer, ram="1GiB", activations="recompute"):
        forwards.clear()
        with torch.no_grad():
            model(torch.randn(5, 3))
        with torch.inference_mode():
            model(torch.randn(5, 3))
        assert len(forwards) == 8


def test_models_found_at_their_first_forward() -> None:
    model = Net(Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(ram="1GiB", activations="recompute"):
        forwards.clear()
        model(torch.randn(5, 3)).backward()
        optimizer.step()
    assert len(forwards) == 8


class Alarm(Exception):
    """What the signal handler raises."""


@pytest.mark.parametrize("phase", ["forward", "recomputation"])
def test_interrupted_at_once_and_left_as_it_was(phase: str) -> None:
    class Slow(Block):
        def inner(self, x: Tensor) -> Tensor:
            is_again = torch._C._current_graph_task_id() != -1
            while is_slow and is_again == (phase == "recomputation"):
                time.sleep(0.001)
            return super().inner(x)

    def ring(*_: Any) -> None:
        raise Alarm

    is_slow = True
    model = Net(Slow)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attributes = [module.__dict__ for module in model.modules()]
    previous = signal.signal(signal.SIGALRM, ring)
    try:
        with zeepo.init(model, optimizer, ram="1GiB", activations="recompute"):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            began = time.monotonic()
            with pytest.raises(Alarm):
                model(torch.randn(5, 3)).backward()
            assert time.monotonic() - began < 5
            assert all(m.__dict__ is d for m, d in zip(model.modules(), attributes, strict=True))
            is_slow = False
            model(torch.randn(5, 3)).backward()
            optimizer.step()
    finally:
        signal.signal(signal.SIGALRM, previous)
