"""Every program with update="backward": the same bits, or a refusal that says why.

Nothing in between: a program whose numbers would differ (it reads or clips gradients, it
accumulates without saying so, it uses a weight again) must be refused before it sees one of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zeepo.errors import SessionError, UnsupportedError
from zeepo.verify.record import Report

from .harness import CASES, check
from .test_parity import EVERY_PLACEMENT

MUST_RUN = {
    "adafactor_single",
    "checkpoint_non_reentrant",
    "checkpoint_reentrant",
    "early_exit",
    "language_model_borrowed",
    "language_model_tied",
    "lora",
    "optimizer_adamw_fused",
    "optimizer_sgd_momentum_foreach",
    "recurrent_lstm",
    "transformer_encoder",
}
"""Ordinary programs, which may not be refused."""

NAMES = [
    pytest.param(name, marks=[] if name in EVERY_PLACEMENT else [pytest.mark.slow], id=name)
    for name in CASES
]


@pytest.mark.parametrize("name", NAMES)
def test_exact_or_refused(name: str, tmp_path: Path) -> None:
    report, refusal = _run(name, tmp_path)
    if refusal is None:
        assert report is not None
        assert report.differences == [], f"\n{report}"
    else:
        assert "update='backward'" in str(refusal)
        assert name not in MUST_RUN, str(refusal)


def _run(name: str, scratch: Path) -> tuple[Report | None, Exception | None]:
    options = {"update": "backward"}
    try:
        report = check(CASES[name], "disk", scratch, options=options, with_gradients=False)
    except (SessionError, UnsupportedError) as refusal:
        return None, refusal
    return report, None
