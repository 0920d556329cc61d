"""Large gradients are made in the memory of those that went, with the bits of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zeepo
from zeepo.chunks.store import ChunkStore
from zeepo.engine.warm_gradients import WarmGradient, can_begin, is_known
from zeepo.errors import SessionError
from zeepo.memory.ledger import Ledger
from zeepo.memory.spares import Spares

WIDTH = 1024  # of a square matrix: 4 MiB, large enough to be announced
NUM_LAYERS = 5


@pytest.fixture(autouse=True)
def small_memory_is_worth_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeepo.chunks.moves.WORTH_KEEPING_BYTES", 1 << 20)


class Layers(nn.Module):
    """Layers that use their weights in one way or another."""

    def __init__(self, use: Callable[[Tensor, nn.Linear], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        widths = [(WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)] * 2
        self.layers = nn.ModuleList(nn.Linear(*shape) for shape in widths[:NUM_LAYERS])
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.use(x, layer).tanh()
        return x.square().mean()


def recomputed(x: Tensor, layer: nn.Linear) -> Tensor:
    result: Tensor = checkpoint(layer, x, use_reentrant=False)
    return result


USES: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "linear": lambda x, layer: layer(x),
    "linear without bias": lambda x, layer: F.linear(x, layer.weight) + layer.bias,
    "linear of three dimensions": lambda x, layer: layer(x[None])[0],
    "matmul": lambda x, layer: x @ layer.weight.t() + layer.bias,
    "addmm of the transposed": lambda x, layer: torch.addmm(layer.bias, x, layer.weight.t()),
    "half the weight": lambda x, layer: x @ (0.5 * layer.weight).t() + layer.bias,
    "recomputed": recomputed,
}


def train(model: nn.Module, num_steps: int, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    losses = []
    for step in range(num_steps):
        x = torch.randn(7 + step, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """Train plainly and under zeepo; the spares of the session."""

    def compare(model: nn.Module, num_steps: int = 4, **options: Any) -> Spares:
        plain = copy.deepcopy(model)
        expected = train(plain, num_steps, torch.optim.SGD(plain.parameters(), 0.1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = {"ram": "2GiB", "update": "backward", **options}
        with zeepo.init(model, optimizer, disk=tmp_path, **options) as session:
            losses = train(model, num_steps, optimizer)
            spares = session._manager.store.moves.spares
        assert spares.nbytes == 0
        assert all(map(torch.equal, losses, expected))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)
        assert torch._C._len_torch_dispatch_stack() == 0
        return spares

    return compare


@pytest.mark.parametrize("use", USES)
def test_gradients_have_the_bits_of_plain_pytorch(run: Any, use: str) -> None:
    spares = run(Layers(USES[use]))
    if use != "half the weight":  # whose product is no parameter's gradient
        assert spares.num_reuses >= NUM_LAYERS


def test_gradients_that_stay_leave_nothing(run: Any) -> None:
    assert run(Layers(USES["linear"]), update="step").num_reuses == 0


class Seen(TorchDispatchMode):
    """Somebody else's mode."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.name():
            self.products.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_users_sees_what_it_would_see(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen()
    backward = Tensor.backward

    def watched(self: Tensor) -> None:
        with seen:
            backward(self)

    monkeypatch.setattr(Tensor, "backward", watched)
    assert run(Layers(USES["linear"])).num_reuses == 0
    assert seen.products == ["aten::mm"] * len(seen.products) != []


def test_a_node_that_fails_leaves_no_mode_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Layers(USES["linear"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with zeepo.init(model, optimizer, ram="2GiB", disk=tmp_path, update="backward") as session:
        train(model, 3, optimizer)
        assert session._manager.store.moves.spares.num_reuses

        warm = WarmGradient._warm
        products: list[Tensor | None] = []

        def fail(*args: Any) -> Tensor | None:
            if len(products) == 3:  # after a unit was updated
                raise RuntimeError("no product")
            products.append(warm(*args))
            return products[-1]

        with monkeypatch.context() as patched:
            patched.setattr(WarmGradient, "_warm", fail)
            loss = model(torch.ones(2, WIDTH))
            with pytest.raises(RuntimeError, match="no product"):
                loss.backward()
        with pytest.raises(SessionError, match="used between backward"):  # half of it is updated
            model(torch.ones(2, WIDTH))
        assert torch._C._len_torch_dispatch_stack() == 0


def test_what_a_failed_backward_kept_goes_with_the_session(tmp_path: Path) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("in the middle")

    model = Layers(USES["linear"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = zeepo.init(model, optimizer, ram="2GiB", disk=tmp_path, update="backward")
    train(model, 2, optimizer)
    spares = session._manager.store.moves.spares
    first, *others = model.layers
    x = first(torch.ones(2, WIDTH))
    x = Failing.apply(x)
    for layer in others:
        x = layer(x)
    with pytest.raises(RuntimeError, match="in the middle"):
        x.sum().backward()
    assert spares.nbytes
    session.close()
    assert spares.nbytes == 0


def test_an_array_that_became_a_gradient_stays_the_users(run: Any) -> None:
    given: list[tuple[Any, float]] = []

    class OfAnArray(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            array = (grad.t() @ x).numpy().copy()
            given.append((array, float(array.sum())))
            return grad @ weight, torch.from_numpy(array)

    def use(x: Tensor, layer: nn.Linear) -> Tensor:
        own: Tensor = OfAnArray.apply(x, layer.weight)
        return (layer(x) if layer.weight.shape[0] == WIDTH else own) + layer.bias

    run(Layers(use))
    assert given
    assert all(float(array.sum()) == total for array, total in given)


def test_a_node_that_makes_two_large_gradients_announces_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two large parameters in one product: which of its products is whose is not known."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Module() for _ in range(3))
    for pair in model:
        for side in ("left", "right"):
            pair.register_parameter(side, nn.Parameter(torch.randn(WIDTH, WIDTH) / 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected: list[int] = []
    expect = ChunkStore.expect

    def noting(self: ChunkStore, nbytes: int) -> None:
        expected.append(nbytes)
        expect(self, nbytes)

    monkeypatch.setattr(ChunkStore, "expect", noting)
    with zeepo.init(model, optimizer, ram="2GiB", disk=tmp_path, update="backward") as session:
        for _ in range(3):
            expected.clear()
            x = torch.ones(3, WIDTH)
            for pair in model:
                x = (x @ (pair.left @ pair.right)).tanh()
            loss = x.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not session._manager.store.moves.spares.num_reuses
    side = WIDTH * WIDTH * 4
    assert [n for n in expected if n <= 2 * side] == [2 * side] * 3  # updates take more


class KeptMemory:
    """So many bytes."""

    def __init__(self, nbytes: int) -> None:
        memory = torch.UntypedStorage(nbytes)
        self.place = memory.data_ptr()
        self._spares = Spares()
        self._spares.keep(memory, Ledger("ram", None).reserve("grads", nbytes))
        self.expected: list[int] = []

    def take(self, nbytes: int) -> torch.UntypedStorage | None:
        return self._spares.take(nbytes)

    def take_zeros(self, rows: Tensor) -> torch.UntypedStorage | None:
        return None

    def expect(self, nbytes: int) -> None:
        self.expected.append(nbytes)

    def is_managed(self, tensor: Tensor) -> bool:
        return False


def test_what_is_on_top_stays_there() -> None:
    warm = WarmGradient(4, KeptMemory(0))
    warm.begin()
    with Seen() as seen:
        warm.end()
        warm.end()
        assert torch._C._len_torch_dispatch_stack() == 1
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert seen.products == ["aten::mm"]
    assert torch._C._len_torch_dispatch_stack() == 0


def test_one_product_of_the_size_is_made_in_the_memory() -> None:
    kept = KeptMemory(16)
    warm = WarmGradient(16, kept)
    left, right = torch.randn(2, 3), torch.randn(3, 2)
    expected = left @ right
    warm.begin()
    try:
        first, second = left @ right, left @ right
        other = left @ torch.ones(3, 5)
    finally:
        warm.end()
    assert first.data_ptr() == kept.place
    assert second.data_ptr() != kept.place
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert torch.equal(other, left @ torch.ones(3, 5))


def test_nobody_is_disturbed() -> None:
    with torch.no_grad():
        assert can_begin()
        with Seen():
            assert not can_begin()
    assert not can_begin()  # a gradient that is to have a graph


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "padding": {"padding_idx": 3},
    "padding from the end": {"padding_idx": -1},
    "scaled": {"scale_grad_by_freq": True},
    "sparse": {"sparse": True},
}
NUM_ROWS, ROW = 37, 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", EMBEDDINGS)
@pytest.mark.parametrize("shape", [(30,), (2, 3, 5), (0,), (38,)])
def test_an_embedding_has_the_gradient_of_torchs_kernel(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Tokens that stand several times add up in their order; what is not known is left to torch."""
    generator = torch.Generator().manual_seed(1)
    embedding = nn.Embedding(NUM_ROWS, ROW, dtype=dtype, **EMBEDDINGS[kind])
    indices = torch.randint(0, 9, shape, generator=generator)
    grad = torch.randn(*shape, ROW, generator=generator).to(dtype)
    (expected,) = torch.autograd.grad(embedding(indices), embedding.weight, grad)
    kept = KeptMemory(nbytes := NUM_ROWS * ROW * dtype.itemsize)
    warm = WarmGradient(nbytes, kept)
    out = embedding(indices)
    node = out.grad_fn
    warm.begin()
    try:
        (found,) = torch.autograd.grad(out, embedding.weight, grad)
    finally:
        warm.end()
    assert torch.equal(found.to_dense(), expected.to_dense())
    if kind in ("scaled", "sparse"):
        assert not is_known(node)
    else:
        assert is_known(node)
        is_warm = indices.numel() <= NUM_ROWS and dtype is not torch.bfloat16
        assert (found.data_ptr() == kept.place) is is_warm
        assert kept.expected == ([] if is_warm else [nbytes])


def test_head_and_embedding_share_their_memory_from_step_to_step(tmp_path: Path) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.tokens = nn.Embedding(2048, 512)
            self.middle = nn.Linear(512, 512)
            self.head = nn.Linear(512, 2048, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.middle(self.tokens(tokens))), tokens)

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for step in range(4):
            tokens = torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(step))
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain, model = Tokens(), Tokens()
    expected = losses(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with zeepo.init(model, optimizer, ram="2GiB", disk=tmp_path, update="backward") as session:
        assert losses(model, optimizer) == expected
        spares = session._manager.store.moves.spares
        assert spares.num_reuses == 7  # all but the first
        assert spares.nbytes == 2048 * 512 * 4
        assert session._manager.store.ledger.by_tag()["gradient memory"] == spares.nbytes
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_what_is_kept_is_a_share_of_ram(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeepo.memory.budget.LEFT_TO_TORCH_SHARE", 1 / 1000)
    assert run(Layers(USES["linear"])).num_reuses == 0


def test_the_input_has_as_many_bytes_as_the_weight(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product that makes the gradient of the input takes no memory that is kept for weights."""
    lost: list[int] = []
    forget_lent = Spares.forget_lent

    def noting(self: Spares) -> None:
        lost.append(self.lent_bytes)
        forget_lent(self)

    monkeypatch.setattr(Spares, "forget_lent", noting)

    class Square(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.repeat(WIDTH, 1)[:WIDTH])

    assert run(Square(USES["linear"])).num_reuses >= NUM_LAYERS
    assert set(lost) == {0}


def test_nothing_is_kept_that_nobody_can_use(tmp_path: Path) -> None:
    """The products of autocast are bf16, and the gradients made of them new."""
    model = Layers(USES["linear"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with zeepo.init(model, optimizer, ram="2GiB", disk=tmp_path, update="backward") as session:
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.ones(2, WIDTH))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        spares = session._manager.store.moves.spares
        assert (spares.num_reuses, spares.nbytes) == (0, 0)


def test_nothing_is_kept_without_a_disk() -> None:
    model = Layers(USES["linear"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with zeepo.init(model, optimizer, ram="2GiB", update="backward") as session:
        train(model, 3, optimizer)
        assert session._manager.store.moves.spares.nbytes == 0
