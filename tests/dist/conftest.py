"""The ranks of the tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that become ranks, shared by the tests of one worker."""
    pool = Ranks()
    yield pool
    pool.stop()
