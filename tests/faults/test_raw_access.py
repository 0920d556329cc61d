"""Ways around torch functions: numpy, addresses, copies, threads. Valid, or refused."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import zeepo
from tests.faults.small import (
    assert_same,
    batch,
    build,
    loss_of,
    open_at_minimum,
    run_program,
    train,
)

UNIT = 8192
"""What one unit of the model takes in a buffer."""


def test_arrays_stay_valid_and_writable_through_evictions_and_close(tmp_path: Path) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    session = open_at_minimum(model, optimizer, tmp_path, extra=3 * UNIT)
    train(model, optimizer, range(2))
    train(plain, plain_optimizer, range(2))
    array = model.layers[3].weight.detach().numpy()
    twin = plain.layers[3].weight.detach().numpy()
    for step in range(2, 5):
        before = session.stats().evictions
        assert train(model, optimizer, [step]) == train(plain, plain_optimizer, [step])
        assert session.stats().evictions > before
        assert np.array_equal(array, twin)
        array[0] += 0.5
        twin[0] += 0.5
    session.close()
    assert np.array_equal(array, twin)
    array[1] = 0.25
    twin[1] = 0.25
    assert train(model, optimizer, [5]) == train(plain, plain_optimizer, [5])
    assert np.array_equal(array, twin)
    assert_same(model, optimizer, plain, plain_optimizer)


def test_a_dead_array_lets_its_chunk_go(tmp_path: Path) -> None:
    model, optimizer = build()
    with open_at_minimum(model, optimizer, tmp_path) as session:
        array = model.layers[3].weight.detach().numpy()
        array[:] = 0.5
        assert any(chunk.leases for chunk in session._store.chunks())
        del array
        train(model, optimizer, range(1))
        assert not any(chunk.leases for chunk in session._store.chunks())


def test_addresses_differ_while_held(tmp_path: Path) -> None:
    model, optimizer = build()
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path):
        pointers = [p.data_ptr() for p in model.parameters()]
        assert len(set(pointers)) == len(pointers)
        assert pointers == [p.data_ptr() for p in model.parameters()]
        storages = [p.untyped_storage().data_ptr() for p in model.parameters()]
        assert storages == pointers
        train(model, optimizer, range(1))


DLPACK = """
import sys
from pathlib import Path
import numpy as np
from tests.faults.small import *
model, optimizer = build()
plain, plain_optimizer = build()
session = open_at_minimum(model, optimizer, Path(sys.argv[1]), extra=60000)
train(model, optimizer, range(2)); train(plain, plain_optimizer, range(2))
arrays = [
    np.from_dlpack(model.layers[2].weight.detach()),
    torch.from_dlpack(model.layers[3].weight.detach()),
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(model.layers[4].weight.detach())),
]
for step in range(2, 5):
    train(model, optimizer, [step]); train(plain, plain_optimizer, [step])
for _ in range(2):
    for number, array in enumerate(arrays, start=2):
        twin = plain.layers[number].weight.detach().numpy()
        if not np.array_equal(np.asarray(array), twin):
            print("stale", number)
    session.close()
print("end")
"""


def test_dlpack(tmp_path: Path) -> None:
    done = run_program(DLPACK, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "end\n"


def test_arrays_of_gradients_do_not_use_up_the_budget(tmp_path: Path) -> None:
    """An array that is alive at zero_grad() keeps its memory, which is no longer in the budget."""
    model, optimizer = build()
    with open_at_minimum(model, optimizer, tmp_path, extra=4 * UNIT) as session:
        held = None
        for step in range(6):
            loss_of(model, step).backward()
            held = model.layers[1].weight.grad.numpy()
            optimizer.step()
            optimizer.zero_grad()
            assert all(bool(p.isfinite().all()) for p in model.parameters())  # no update waits
            if step == 2:
                used = session.stats().bytes_by_tag.get("grads", 0)
        assert session.stats().bytes_by_tag.get("grads", 0) <= used
        assert held is not None


def test_a_state_dict_taken_before_init_stays_live(tmp_path: Path) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    held, twin = model.state_dict(), plain.state_dict()
    with open_at_minimum(model, optimizer, tmp_path):
        for step in range(3):
            train(model, optimizer, [step])
            train(plain, plain_optimizer, [step])
            assert all(torch.equal(held[name], twin[name]) for name in twin)
        held["layers.2.weight"].mul_(0.5)
        twin["layers.2.weight"].mul_(0.5)
        assert train(model, optimizer, [3]) == train(plain, plain_optimizer, [3])
    train(model, optimizer, [4])
    train(plain, plain_optimizer, [4])
    for name in twin:
        assert torch.equal(held[name], twin[name])
        assert type(held[name].clone()) is torch.Tensor


def test_a_held_gradient_keeps_its_values(tmp_path: Path) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    with open_at_minimum(model, optimizer, tmp_path, extra=3 * UNIT):
        for m, o in ((model, optimizer), (plain, plain_optimizer)):
            loss_of(m, 0).backward()
            o.step()
        held = [p.grad for p in model.parameters()]
        arrays = [p.grad.numpy() for p in model.layers[1].parameters()]
        twins = [p.grad for p in plain.parameters()]
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        train(model, optimizer, range(2))
        train(plain, plain_optimizer, range(2))
        assert all(torch.equal(a, b) for a, b in zip(held, twins, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(held, twins, strict=True))
    for array, p in zip(arrays, plain.layers[1].parameters(), strict=True):
        assert array.shape == p.shape
    assert np.array_equal(arrays[0], twins[2].numpy())
    assert_same(model, optimizer, plain, plain_optimizer)


def test_a_held_gradient_of_one_slot_is_not_overwritten(tmp_path: Path) -> None:
    """Its neighbour keeps the chunk alive; the next gradient must not land in the held memory."""
    model, optimizer = build()
    with open_at_minimum(model, optimizer, tmp_path, extra=3 * UNIT) as session:
        loss_of(model, 0).backward()
        weight = model.layers[1].weight
        session._store.evict(session._manager.grad_chunks[session._manager.home(weight).chunk.key])
        array = weight.grad.numpy()
        expected = array.copy()
        weight.grad = None
        loss_of(model, 1).backward()
        assert np.array_equal(array, expected)
        assert not np.array_equal(weight.grad.detach().clone().numpy(), expected)


def test_copies_are_ordinary(tmp_path: Path) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    with open_at_minimum(model, optimizer, tmp_path):
        train(model, optimizer, range(2))
        train(plain, plain_optimizer, range(2))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies = {
            "deepcopy": copy.deepcopy(model),
            "pickle": pickle.loads(pickle.dumps(model)),
            "torch.save": torch.load(buffer, weights_only=False),
        }
        states = io.BytesIO()
        torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, states)
        for p in (model.layers[2].weight,):
            copies_of_one = [copy.deepcopy(p), pickle.loads(pickle.dumps(p)), copy.copy(p)]
            assert all(torch.equal(c, plain.layers[2].weight) for c in copies_of_one)
        train(model, optimizer, [2])
    for name, twin in copies.items():
        assert all(type(p) is nn.Parameter for p in twin.parameters()), name
        pairs = zip(twin.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), name
    states.seek(0)
    loaded = torch.load(states, weights_only=True)
    fresh, fresh_optimizer = build(1)
    fresh.load_state_dict(loaded["m"])
    fresh_optimizer.load_state_dict(loaded["o"])
    assert_same(fresh, fresh_optimizer, plain, plain_optimizer)
    assert train(fresh, fresh_optimizer, [3]) == train(plain, plain_optimizer, [3])


def test_parameters_behave_as_parameters(tmp_path: Path) -> None:
    model, optimizer = build()
    plain, _ = build()
    bias, twin = model.layers[0].bias, plain.layers[0].bias
    hashes = {p: name for name, p in model.named_parameters()}
    with open_at_minimum(model, optimizer, tmp_path):
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        assert all(isinstance(p, torch.Tensor) for p in model.parameters())
        assert hashes[bias] == "layers.0.bias"
        assert dict.fromkeys(model.parameters(), 1)[bias] == 1
        assert any(p is bias for p in model.parameters())
        assert bias in [bias]
        assert bias in set(model.parameters())
        assert repr(bias) == repr(twin)
        assert str(bias) == str(twin)
        assert repr(model) == repr(plain)
        assert bias.tolist() == twin.tolist()
        assert [x.item() for x in bias] == [x.item() for x in twin]
        assert len(bias) == len(twin)
        assert bool((bias == twin).all())
        assert bias[0].item() == float(bias.detach()[0]) == twin[0].item()
        assert int(bias.numel()) == 32
        assert np.array_equal(np.asarray(bias.detach()), twin.detach().numpy())
        assert (bias.detach() + 1 == 1 + twin.detach()).all()
        assert torch.equal(torch.stack([bias, bias]), torch.stack([twin, twin]))
        with pytest.raises(RuntimeError, match="requires grad"):
            bias.numpy()
        with pytest.raises(RuntimeError, match="Boolean value"):
            bool(bias)
        with pytest.raises(RuntimeError, match="Tensor with 32 elements"):
            bias.item()


def test_elements_can_be_formatted(tmp_path: Path) -> None:
    model, optimizer = build()
    expected = f"{model.layers[0].bias[0]:.3f}"
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path):
        assert f"{model.layers[0].bias[0]:.3f}" == expected


def test_threads_read_while_the_main_thread_trains(tmp_path: Path) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    failures: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                for p in model.parameters():
                    assert torch.isfinite(p.detach().clone()).all()
                with torch.no_grad():
                    assert torch.isfinite(model(batch(0))).all()
        except BaseException as error:
            failures.append(error)

    probe = zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path)
    ram = probe.plan.minimum_ram + 12 * UNIT  # each reader holds a unit of its own
    probe.close()
    with zeepo.init(model, optimizer, ram=ram, disk=tmp_path):
        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        losses = train(model, optimizer, range(6))
        stop.set()
        for reader in readers:
            reader.join()
    assert not failures, failures[0]
    assert losses == train(plain, plain_optimizer, range(6))
    assert_same(model, optimizer, plain, plain_optimizer)
