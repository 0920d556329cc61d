"""Memory that is kept for gradients to come."""

from __future__ import annotations

from torch import UntypedStorage

from zeepo.memory.spares import Spares


def kept(*sizes: int) -> Spares:
    spares = Spares()
    for nbytes in sizes:
        spares.keep(UntypedStorage(nbytes))
    return spares


def test_only_the_very_size_serves() -> None:
    spares = kept(100, 200, 200)
    assert spares.take(150) is None
    for left in (300, 100):
        memory = spares.take(200)
        assert memory is not None
        assert memory.nbytes() == 200
        assert spares.nbytes == left
    assert spares.take(200) is None
    assert spares.num_reuses == 2


def test_the_largest_go_first_and_no_more_than_needed() -> None:
    spares = kept(100, 300, 200)
    assert spares.let_go(-5) == spares.let_go(0) == 0
    assert spares.let_go(301) == 500
    assert spares.has(100)
    assert spares.let_go() == 100
    assert (spares.nbytes, spares.let_go()) == (0, 0)
