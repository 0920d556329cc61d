"""Ranks ask each other for bytes: the right ones, of the right version, sent or copied."""

from __future__ import annotations

import pytest

from tests.dist.network_programs import exchange
from tests.dist.ranks import Ranks


@pytest.mark.parametrize(("num_ranks", "near"), [(2, False), (3, True)], ids=["sent", "copied"])
def test_ranks_get_what_they_ask_for(ranks: Ranks, num_ranks: int, near: bool) -> None:
    for answer in ranks.run(num_ranks, exchange, near):
        assert answer["is_right"]
        assert answer["were_early"]
        assert answer["late"]
        assert answer["closed"]
        assert answer["told"] == [f"I am {rank}".encode() for rank in range(num_ranks)]
        assert answer["near"] == (num_ranks - 1 if near else 0)
        assert answer["sent"] == {"params": (num_ranks - 1) * 1_000_004}
        assert (answer["posted"] > 1_000_000) is not near
