"""Embeddings by rows: the bits of plain PyTorch, whatever else happens to the table."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeepo
from zeepo.engine import table as table_module
from zeepo.engine.tables import Tables
from zeepo.engine.tuning import tuned
from zeepo.errors import CorruptionError, DiskError, SessionError
from zeepo.memory.records import Records

ROWS = 9001
WIDTH = 144
"""A row is no whole page, and neither is the table."""
NUM_PAGES = -(-ROWS * WIDTH * 4 // 4096)


class Model(nn.Module):
    """An embedding, three layers, and a head."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(ROWS, WIDTH, padding_idx=3, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3))
        self.head = nn.Linear(WIDTH, 50, bias=False, dtype=dtype)
        self.tied = tied

    def forward(self, rows: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(rows)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return loss + x.sum() * self.tokens.weight[7].sum() * 1e-4 if self.tied else loss


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Rows that come again and again, rows that are new, the last row, padding, one row twice."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(ROWS, (2, 8), generator=generator)
    rows[0, :3] = torch.tensor([3, ROWS - 1 - step % 2, 10 + step % 5])
    rows[1, 0] = rows[0, 4]
    return rows, torch.randint(50, (2, 8), generator=generator)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam_amsgrad_decay": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "own_adamw": lambda p: zeepo.optim.AdamW(p, lr=1e-2),
    "own_bf16": lambda p: zeepo.optim.AdamW(p, lr=1e-2, state_dtype="bf16"),
}
Do = Callable[[Model, torch.optim.Optimizer, int], Any]


def train(
    model: Model, optimizer: torch.optim.Optimizer, num_steps: int, do: Do | None = None
) -> list[float]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    losses = []
    for step in range(num_steps):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if do is not None:
            do(model, optimizer, step)
    return losses


def all_bits(model: Model, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [s for p in model.parameters() for s in optimizer.state[p].values()]
    return [*model.parameters(), *(s for s in states if isinstance(s, Tensor))]


def tables_of(session: Any) -> Tables:
    return session._backward_updates._tables  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def small_tables() -> Iterator[None]:
    """Pieces end inside pages; nothing stays in RAM that need not."""
    with tuned(table_bytes=1 << 20, piece_bytes=(1 << 20) + 64 * 7, least_ram=True):
        yield


def compare(
    name: str,
    scratch: Path,
    num_steps: int,
    do: Do | None = None,
    look: Callable[[Any, int], None] | None = None,
    **options: Any,
) -> None:
    """Train plainly and under zeepo; everything must have the same bits."""
    plain = Model(**options)
    managed = copy.deepcopy(plain)
    plain_optimizer = OPTIMIZERS[name](plain.parameters())
    optimizer = OPTIMIZERS[name](managed.parameters())
    losses = train(plain, plain_optimizer, num_steps, do)
    on_disk = dict.fromkeys(("params", "grads", "optimizer_state"), "disk")
    with zeepo.init(managed, optimizer, disk=scratch, update="backward", **on_disk) as session:

        def both(m: Model, o: torch.optim.Optimizer, step: int) -> None:
            if do is not None:
                do(m, o, step)
            if look is not None:
                look(session, step)

        assert train(managed, optimizer, num_steps, both) == losses
    for ours, theirs in zip(
        all_bits(managed, optimizer), all_bits(plain, plain_optimizer), strict=True
    ):
        assert torch.equal(ours, theirs)


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_have_the_bits_of_plain_pytorch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over more steps than it takes for every page to have had its turn, several times."""
    monkeypatch.setattr(table_module, "CATCH_UP_STEPS", 6)
    pages: list[int] = []
    behind: list[int] = []

    def look(session: Any, _: int) -> None:
        tables = tables_of(session)
        pages.append(tables.num_pages())
        for table in tables._tables.values():
            behind.append(int(table._num_updates - table._num_done.min()))
            assert len(table._past) == behind[-1]

    compare(name, tmp_path, 25, look=look)
    assert pages[-1] == (0 if name == "own_bf16" else NUM_PAGES)
    if behind:
        assert 4 <= max(behind) <= 6


def test_with_other_numbers(tmp_path: Path) -> None:
    compare("adamw_fused", tmp_path, 6, dtype=torch.float64)


def read_a_row(model: Model, optimizer: Any, step: int) -> Any:
    return model.tokens.weight[5].sum().item() if step == 4 else None


def read_a_state(model: Model, optimizer: Any, step: int) -> Any:
    state = optimizer.state[model.tokens.weight]
    return state["exp_avg_sq"].sum().item() if step == 4 else None


def change_values(model: Model, optimizer: Any, step: int) -> None:
    if step == 4:
        with torch.no_grad():
            model.tokens.weight[11] = 0.5


def load_states(model: Model, optimizer: Any, step: int) -> None:
    if step == 4:
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"] * 2
        optimizer.load_state_dict(saved)


def replace_a_state(model: Model, optimizer: Any, step: int) -> None:
    if step == 4:
        optimizer.state[model.tokens.weight]["exp_avg"] = torch.full((ROWS, WIDTH), 1e-3)


def forget_states(model: Model, optimizer: Any, step: int) -> None:
    if step == 4:
        del optimizer.state[model.tokens.weight]


def look_all_up(model: Model, optimizer: Any, step: int) -> None:
    if step == 4:
        model(torch.arange(ROWS)[None], torch.zeros(1, ROWS, dtype=torch.long))


def look_few_up(model: Model, optimizer: Any, step: int) -> None:
    with torch.no_grad():
        model(*batch(step + 100))


def freeze_for_a_while(model: Model, optimizer: Any, step: int) -> None:
    model.tokens.weight.requires_grad_(not 4 <= step < 7)


def change_the_optimizer(model: Model, optimizer: Any, step: int) -> None:
    optimizer.param_groups[0]["betas"] = (0.8 + step / 100, 0.99)
    optimizer.param_groups[0]["weight_decay"] = step / 10


def keep_the_gradient(model: Model, optimizer: Any, step: int) -> None:
    if step == 4:
        kept: list[Tensor] = []
        model.tokens.weight.register_hook(lambda grad: kept.append(grad))
        model.kept = kept  # type: ignore[assignment]
    elif step > 4:
        assert all(bool(grad.abs().sum() > 0) for grad in model.kept)  # type: ignore[union-attr]


def change_the_gradient(model: Model, optimizer: Any, step: int) -> None:
    if step == 4:
        model.tokens.weight.register_hook(lambda grad: grad + 1e-3)


def use_it_otherwise(model: Model, optimizer: Any, step: int) -> None:
    model.tied = 4 <= step < 7


EVENTS = {
    f.__name__: f
    for f in (
        read_a_row,
        read_a_state,
        change_values,
        load_states,
        replace_a_state,
        forget_states,
        look_all_up,
        look_few_up,
        freeze_for_a_while,
        change_the_optimizer,
        keep_the_gradient,
        change_the_gradient,
        use_it_otherwise,
    )
}
STAYS = {"look_few_up", "freeze_for_a_while", "change_the_optimizer"}
"""What a table serves."""


@pytest.mark.parametrize("event", EVENTS)
def test_whatever_happens_to_it(event: str, tmp_path: Path) -> None:
    pages: dict[int, int] = {}

    def look(session: Any, step: int) -> None:
        pages[step] = tables_of(session).num_pages()

    compare("adamw_fused", tmp_path, 14, do=EVENTS[event], look=look)
    assert pages[3] == NUM_PAGES
    left = [step for step in range(4, 7) if not pages[step]]
    assert bool(left) is (event not in STAYS)
    if event not in ("keep_the_gradient", "change_the_gradient"):  # in every step
        assert pages[13] == NUM_PAGES


@pytest.mark.parametrize("place", ["tensor", "node", "before_accumulation"])
@pytest.mark.parametrize("change", ["in_place", "data", "numpy", "returned", "only_read"])
def test_a_hook_that_changes_the_gradient(change: str, place: str, tmp_path: Path) -> None:
    """What it wrote is in every row, not only in those that were looked up."""

    def hook(grad: Tensor) -> Tensor | None:
        if change == "only_read":
            assert grad.sum().isfinite()
        elif change == "numpy":
            grad.detach().numpy()[:] += 1e-3
        else:
            (grad.data if change == "data" else grad).add_(1e-3)
        return grad if change == "returned" else None

    def in_tuple(grads: Any, *_: Any) -> Any:
        changed = hook(grads[0])
        return None if changed is None else (changed, *grads[1:])

    def do(model: Model, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step != 3:
            return
        weight = model.tokens.weight
        if place == "tensor":
            weight.register_hook(hook)
        elif place == "node":
            model.tokens.register_forward_hook(
                lambda module, args, out: out.grad_fn.register_hook(in_tuple) and None
            )
        else:
            node = weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            node.register_prehook(in_tuple)
            kept.append(node)

    kept: list[Any] = []
    compare("adamw_fused", tmp_path, 8, do)


@pytest.mark.parametrize(
    ("way", "is_cut"),
    [
        ("read", True),
        ("read", False),
        ("change", True),
        ("change", False),
        ("numpy", False),
        ("numpy_change", False),
        ("late_numpy", False),
    ],
)
def test_states_that_somebody_touched_before(way: str, is_cut: bool, tmp_path: Path) -> None:
    """Just before the parameter becomes a table, and read again when it is one."""
    held: dict[int, Any] = {}

    def do(model: Model, optimizer: torch.optim.Optimizer, step: int) -> None:
        state = optimizer.state[model.tokens.weight]["exp_avg"]
        if step == (2 if way == "late_numpy" else 0):
            with torch.no_grad():
                state.mul_(0.5) if way == "change" else state.sum()
            if "numpy" in way:
                held[id(model)] = state.numpy()
        elif way == "numpy_change" and step == 2:
            held[id(model)][:] *= 0.5
        elif step == 4:
            sums.setdefault(id(model), []).append(float(state.sum()))
            if id(model) in held:
                sums[id(model)].append(float(held[id(model)].sum(dtype="float64")))

    sums: dict[int, list[float]] = {}
    with tuned(piece_bytes=(1 << 20) + 64 * 7 if is_cut else 32 << 20):
        compare("adamw_fused", tmp_path, 7, do)
    plain, managed = sums.values()
    assert plain == managed


def test_a_tied_embedding_never_becomes_one(tmp_path: Path) -> None:
    pages: list[int] = []
    compare(
        "adamw_fused",
        tmp_path,
        5,
        look=lambda session, _: pages.append(tables_of(session).num_pages()),
        tied=True,
    )
    assert not any(pages)


def test_two_lookups_in_a_step(tmp_path: Path) -> None:
    """Their gradients are added up by autograd: that is not a gradient of rows alone."""

    class Twice(Model):
        def forward(self, rows: Tensor, targets: Tensor) -> Tensor:
            return super().forward(rows, targets) + super().forward(rows.flip(0) // 2, targets)

    for number, steps in enumerate((4, 9)):
        plain, managed = Twice(), Twice()
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, managed)]
        losses = train(plain, optimizers[0], steps)
        (folder := tmp_path / str(number)).mkdir()
        with zeepo.init(managed, optimizers[1], disk=folder, ram="1GiB", update="backward"):
            assert train(managed, optimizers[1], steps) == losses
        for ours, theirs in zip(managed.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)


# -- what it moves ---------------------------------------------------------------------------------


def test_only_pages_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step: the pages that are looked up, and those whose turn it is."""
    moved: list[tuple[str, int]] = []
    for what in ("read", "write"):
        original = getattr(Records, what)

        def count(
            self: Records, numbers: Any, memory: Any, _w: str = what, _o: Any = original, **k: Any
        ) -> Any:
            moved.append((_w, len(numbers)))
            assert memory.nbytes == len(numbers) * self.record_bytes == len(numbers) * 3 * 4096
            return _o(self, numbers, memory, **k)

        monkeypatch.setattr(Records, what, count)
    turn = -(-NUM_PAGES // (table_module.CATCH_UP_STEPS - 1))

    def look(_: Any, step: int) -> None:
        if step >= 4:
            reads = [n for what, n in moved if what == "read"]
            assert len(reads) == 2
            assert 14 <= reads[0] <= 32
            assert reads[1] == turn
            assert sum(n for what, n in moved if what == "write") <= reads[0] + turn
        moved.clear()

    compare("adamw_fused", tmp_path, 10, look=look)


# -- what goes wrong -------------------------------------------------------------------------------


def opened(scratch: Path) -> tuple[Model, torch.optim.Optimizer, Any]:
    model = Model()
    optimizer = OPTIMIZERS["adamw_fused"](model.parameters())
    session = zeepo.init(model, optimizer, disk=scratch, ram="1GiB", update="backward")
    train(model, optimizer, 4)
    assert tables_of(session).num_pages() == NUM_PAGES
    return model, optimizer, session


def test_it_is_not_used_before_the_step(tmp_path: Path) -> None:
    model, optimizer, session = opened(tmp_path)
    model(*batch(4)).backward()
    with pytest.raises(SessionError, match=r"between backward\(\) and"):
        model(*batch(5))
    with pytest.raises(SessionError, match=r"between backward\(\) and"):
        model.tokens.weight.sum()
    with pytest.raises(SessionError, match="is gone"):
        model.tokens.weight.grad  # noqa: B018
    optimizer.step()
    optimizer.zero_grad()
    model(*batch(5))
    session.close()


def test_threads_look_up_rows_of_one_table(tmp_path: Path) -> None:
    found: list[tuple[Tensor, Tensor]] = []

    def look_up(weight: Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(60):
            rows = torch.randint(ROWS, (6,), generator=generator)
            with torch.no_grad():
                found.append((rows, F.embedding(rows, weight)))

    def do(model: Model, optimizer: Any, step: int) -> None:
        if step != 5:
            return
        with ThreadPoolExecutor(4) as threads:
            tasks = [threads.submit(look_up, model.tokens.weight, seed) for seed in range(4)]
        for task in tasks:
            task.result()
        true = model.tokens.weight.detach().clone()
        assert all(torch.equal(true[rows], values) for rows, values in found)

    def look(session: Any, step: int) -> None:
        pages[step] = tables_of(session).num_pages()

    pages: dict[int, int] = {}
    compare("adamw_fused", tmp_path, 7, do, look)
    assert pages[4] == NUM_PAGES
    assert len(found) == 2 * 240


def test_rows_give_way_where_room_is_short(tmp_path: Path) -> None:
    """What tables hold between two uses goes to disk before anything is refused."""
    had: list[bool] = []

    def look(session: Any, _: int) -> None:
        moves = session._store.moves
        assert moves.let_rows_go is not None
        had.append(moves.let_rows_go())
        assert table_module.TABLE_TAG not in moves.ledger.by_tag()
        assert not moves.let_rows_go()

    compare("adamw_fused", tmp_path, 40, look=look)
    assert sum(had) > 30


def test_rows_that_do_not_exist_are_torchs_error(tmp_path: Path) -> None:
    model, _, session = opened(tmp_path)
    with pytest.raises(IndexError):
        model(torch.tensor([[0, ROWS]]), torch.zeros(1, 2, dtype=torch.long))
    model(*batch(5))
    session.close()


def test_no_room_on_disk_for_it(tmp_path: Path) -> None:
    """It stays in its chunks, and nothing else changes."""
    plain, managed = Model(), Model()
    optimizers = [OPTIMIZERS["adamw_fused"](m.parameters()) for m in (plain, managed)]
    losses = train(plain, optimizers[0], 6)
    nbytes = sum(p.numel() * 4 for p in managed.parameters())
    on_disk = dict.fromkeys(("params", "grads", "optimizer_state"), "disk")
    limit = int(4.5 * nbytes)  # parameters and states, but not the table beside them
    with zeepo.init(
        managed, optimizers[1], disk=tmp_path, disk_limit=limit, update="backward", **on_disk
    ) as session:
        assert train(managed, optimizers[1], 6) == losses
        assert tables_of(session).num_pages() == 0


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    model, _, session = opened(tmp_path)
    (table,) = tables_of(session)._tables.values()
    extent = table._records._extent
    table.flush()
    table._settle()
    rows, targets = batch(50)
    place = table._records._place(int(rows[1, 5]) * WIDTH * 4 // 4096)
    block = next(b for b in extent.blocks if b.low <= place < b.high)  # type: ignore[attr-defined]
    with open(block.file.path, "r+b") as file:
        file.seek(block.offset + place - block.low + 17)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))
    with pytest.raises(CorruptionError, match="tokens by rows"):
        model(rows, targets)
    with pytest.raises(DiskError, match="tokens"):
        session.close()


def test_a_disk_that_fails_in_an_update_tears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, session = opened(tmp_path)

    def refuse(*_: Any, **__: Any) -> Any:
        raise DiskError("the disk is gone")

    loss = model(*batch(4))
    with monkeypatch.context() as patch:
        patch.setattr(Records, "write", refuse)
        with pytest.raises(DiskError, match="is gone"):
            loss.backward()
    with pytest.raises(SessionError, match="half-way"):
        optimizer.step()
    session.close()
