"""Memory that is kept for gradients to come."""

from __future__ import annotations

from torch import UntypedStorage

from zeepo.memory.ledger import Ledger
from zeepo.memory.spares import SPARE_TAG, TRY_AGAIN, Spares


def kept(*sizes: int) -> tuple[Spares, Ledger]:
    spares, ledger = Spares(), Ledger("ram", 10_000)
    for nbytes in sizes:
        spares.keep(UntypedStorage(nbytes), ledger.reserve("grads", nbytes))
    return spares, ledger


def test_only_the_very_size_serves() -> None:
    spares, ledger = kept(100, 200, 200)
    assert spares.take(150) is None
    for left in (300, 100):
        memory = spares.take(200)
        assert memory is not None
        assert memory.nbytes() == 200
        assert spares.nbytes == left
    assert spares.take(200) is None
    assert spares.num_reuses == 2
    assert ledger.by_tag() == {SPARE_TAG: 500}  # what is in use counts as well


def test_the_largest_go_first_and_no_more_than_needed() -> None:
    spares, ledger = kept(100, 300, 200)
    assert spares.let_go(-5) == spares.let_go(0) == 0
    assert spares.let_go(301) == 500
    assert ledger.used_bytes == 100
    assert spares.has(100)
    assert spares.let_go() == 100
    assert (spares.nbytes, spares.let_go(), ledger.used_bytes) == (0, 0, 0)


def test_a_gradient_has_the_place_of_its_memory_in_the_ledger() -> None:
    spares, ledger = kept(100)
    memory = spares.take(100)
    assert memory is not None
    assert spares.arrived(UntypedStorage(100)) is None  # in other memory
    reservation = spares.arrived(memory)
    assert reservation is not None
    assert spares.arrived(memory) is None
    spares.keep(memory, reservation)
    assert (spares.nbytes, ledger.used_bytes) == (100, 100)


def test_what_no_gradient_arrived_in_is_not_counted_for_ever() -> None:
    spares, ledger = kept(100, 200)
    memory = spares.take(100)
    spares.forget_lent()
    assert ledger.used_bytes == 200
    assert memory is not None
    assert spares.arrived(memory) is None


def test_what_nobody_took_in_a_backward_goes_at_its_end() -> None:
    spares, ledger = kept(100, 200, 200)
    spares.begin_backward()
    memory = spares.take(200)
    assert memory is not None
    reservation = spares.arrived(memory)
    assert reservation is not None
    spares.keep(memory, reservation)
    spares.keep(UntypedStorage(100), ledger.reserve("grads", 100))  # it cannot be made in that
    spares.end_backward()
    assert (spares.nbytes, ledger.used_bytes) == (200, 200)  # one of them was enough
    assert spares.is_wanted(200)
    assert not spares.is_wanted(100)
    for _ in range(TRY_AGAIN):
        spares.begin_backward()
        spares.end_backward()
    assert spares.is_wanted(100)


def test_memory_at_an_address_that_was_lent_before_is_counted_once() -> None:
    spares, ledger = kept(100)
    memory = spares.take(100)
    assert memory is not None
    spares.keep(memory, ledger.reserve("grads", 100))  # another, where the first died
    assert spares.take(100) is not None
    assert (spares.lent_bytes, ledger.used_bytes) == (100, 100)
