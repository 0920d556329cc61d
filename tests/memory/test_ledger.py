"""The ledger: never past its limit, and a bill that adds up."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeepo.errors import BudgetError, InternalError
from zeepo.memory.ledger import Ledger
from zeepo.units import GiB, MiB


def test_counts_by_tag_and_peak() -> None:
    ledger = Ledger("ram", 100)
    params = ledger.reserve("params", 60)
    grads = ledger.reserve("grads", 40)
    assert (ledger.used_bytes, ledger.free_bytes, ledger.peak_bytes) == (100, 0, 100)
    assert ledger.by_tag() == {"params": 60, "grads": 40}
    assert not ledger.can_reserve(1)
    assert ledger.can_reserve(0)
    params.release()
    params.release()  # A second time changes nothing.
    assert (ledger.used_bytes, ledger.free_bytes, ledger.peak_bytes) == (40, 60, 100)
    grads.retag("idle")
    assert ledger.by_tag() == {"idle": 40}
    grads.release()
    assert ledger.by_tag() == {}


def test_refusal_is_an_itemised_bill_and_takes_nothing() -> None:
    ledger = Ledger("ram", GiB)
    ledger.reserve("params", 512 * MiB)
    ledger.reserve("grads", 500 * MiB)
    with pytest.raises(BudgetError) as raised:
        ledger.reserve("buffers", 64 * MiB)
    assert str(raised.value) == (
        "cannot place 64.0 MiB in ram: 12.0 MiB free of 1.0 GiB "
        "(params 512.0 MiB, grads 500.0 MiB). "
        "Raise ram to 1.1 GiB or more, or let a lower tier hold some of it."
    )
    assert ledger.used_bytes == 1012 * MiB
    assert isinstance(raised.value, MemoryError)


def test_no_limit() -> None:
    ledger = Ledger("ram", None)
    ledger.reserve("params", 1 << 50)
    assert ledger.can_reserve(1 << 50)
    ledger.limit_bytes = 10
    assert ledger.free_bytes == 0


def test_a_limit_of_zero_refuses_every_byte() -> None:
    with pytest.raises(BudgetError, match="nothing in use"):
        Ledger("ram", 0).reserve("params", 1)


def test_a_lowered_limit_stops_new_reservations_only() -> None:
    ledger = Ledger("ram", 100)
    first = ledger.reserve("params", 80)
    ledger.limit_bytes = 50
    assert ledger.free_bytes == 0
    with pytest.raises(BudgetError):
        ledger.reserve("params", 1)
    first.release()
    ledger.reserve("params", 50)


def test_a_guest_brings_its_room_and_takes_it_along() -> None:
    ledger = Ledger("ram", 100)
    held = ledger.reserve("params", 90)
    guest = ledger.admit("grads", 500)
    assert (ledger.limit_bytes, ledger.used_bytes, ledger.free_bytes) == (600, 590, 10)
    assert ledger.by_tag() == {"grads": 500, "params": 90}
    ledger.limit_bytes = 550  # fell meanwhile
    guest.release()
    guest.release()
    assert (ledger.limit_bytes, ledger.used_bytes, ledger.guest_bytes) == (50, 90, 0)
    held.release()
    assert ledger.free_bytes == 50
    assert Ledger("ram", None).admit("grads", 5).nbytes == 5


def test_context_manager_gives_back() -> None:
    ledger = Ledger("ram", 10)
    with ledger.reserve("temporary", 10) as reservation:
        assert (reservation.tag, reservation.nbytes) == ("temporary", 10)
    assert ledger.used_bytes == 0


def test_misuse_is_an_internal_error() -> None:
    ledger = Ledger("ram", 10)
    with pytest.raises(InternalError):
        ledger.reserve("params", -1)
    reservation = ledger.reserve("params", 1)
    reservation.release()
    with pytest.raises(InternalError, match="released"):
        reservation.retag("grads")


@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.booleans())),
)
def test_used_is_the_sum_of_live_reservations(
    limit_bytes: int, steps: list[tuple[str, int, bool]]
) -> None:
    ledger = Ledger("ram", limit_bytes)
    live = []
    for tag, nbytes, drop_first in steps:
        if drop_first and live:
            live.pop(0).release()
        fits = sum(r.nbytes for r in live) + nbytes <= limit_bytes
        assert ledger.can_reserve(nbytes) == fits
        if fits:
            live.append(ledger.reserve(tag, nbytes))
        else:
            with pytest.raises(BudgetError):
                ledger.reserve(tag, nbytes)
        assert ledger.used_bytes == sum(r.nbytes for r in live) == sum(ledger.by_tag().values())
        assert ledger.used_bytes <= ledger.peak_bytes <= limit_bytes


@pytest.mark.parametrize("is_guest", [False, True])
def test_a_reservation_shrinks(is_guest: bool) -> None:
    ledger = Ledger("ram", 10)
    reservation = ledger.admit("a", 6) if is_guest else ledger.reserve("a", 6)
    reservation.shrink(4)
    assert (ledger.used_bytes, ledger.by_tag(), reservation.nbytes) == (4, {"a": 4}, 4)
    assert (ledger.limit_bytes, ledger.guest_bytes) == ((14, 4) if is_guest else (10, 0))
    with pytest.raises(InternalError):
        reservation.shrink(5)
    reservation.release()
    assert (ledger.used_bytes, ledger.limit_bytes, ledger.guest_bytes) == (0, 10, 0)
    with pytest.raises(InternalError):
        reservation.shrink(0)


def test_threads_never_pass_the_limit() -> None:
    ledger = Ledger("ram", 5)
    refused = []

    def work(tag: str) -> None:
        for _ in range(500):
            try:
                with ledger.reserve(tag, 1) as reservation:
                    reservation.retag(tag + "'")
            except BudgetError:
                refused.append(tag)

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.used_bytes == 0
    assert ledger.by_tag() == {}
    assert ledger.peak_bytes <= 5
