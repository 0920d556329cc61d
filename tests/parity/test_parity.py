"""Every case, plainly twice, and under zeepo in every placement at the least ram."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import (  # noqa: F401  (importing registers the cases)
    cases_backward,
    cases_compile,
    cases_hf,
    cases_hooks,
    cases_modules,
    cases_optim,
    cases_optim_whole,
    cases_precision,
    cases_routing,
    cases_schedule,
    cases_state,
    cases_structure,
    cases_user,
)
from .harness import CASES, check, expected_record, run_plain
from .record import compare

try:
    from zeepo import init as _init
except ImportError:
    _init = None  # type: ignore[assignment]


def _mark(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if CASES[name].slow else []


NAMES = [pytest.param(name, marks=_mark(name), id=name) for name in CASES]
RUNS = [
    pytest.param(name, placement, marks=_mark(name), id=f"{name}-{placement}")
    for name, case in CASES.items()
    for placement in case.placements
]


@pytest.mark.parametrize("name", NAMES)
def test_plain_is_deterministic(name: str) -> None:
    """A case that differs from itself could not show anything."""
    expected = expected_record(name)
    losses = [key for key, _ in expected.observations if key.startswith("loss")]
    assert len(losses) >= 5, f"only {len(losses)} losses are observed"
    assert compare(expected, run_plain(CASES[name])) == []


@pytest.mark.skipif(_init is None, reason="zeepo.init does not exist yet")
@pytest.mark.parametrize(("name", "placement"), RUNS)
def test_parity(name: str, placement: str, tmp_path: Path) -> None:
    """Every observation, parameter, gradient and optimizer state has the bits of plain PyTorch."""
    report = check(CASES[name], placement, tmp_path)
    assert report.passed, f"\n{report}"
