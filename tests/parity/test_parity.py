"""Every case, plainly twice, and under zeepo in every placement at the least ram."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeepo.verify.record import compare

from . import (  # noqa: F401  (importing registers the cases)
    cases_backward,
    cases_compile,
    cases_extra,
    cases_findings,
    cases_hf,
    cases_hooks,
    cases_modules,
    cases_optim,
    cases_optim_own,
    cases_optim_whole,
    cases_precision,
    cases_put_off,
    cases_recompute,
    cases_routing,
    cases_schedule,
    cases_state,
    cases_structure,
    cases_user,
)
from .harness import ACTIVATIONS, CASES, PAGE_BYTES, check, expected_record, run_plain

try:
    from zeepo import init as _init
except ImportError:
    _init = None  # type: ignore[assignment]


EVERY_PLACEMENT = [
    "checkpoint_reentrant",
    "checkpoint_non_reentrant",
    "custom_function",
    "eval_between_steps_inference_mode",
    "gan",
    "grad_scaler_clipped",
    "gradient_penalty",
    "hf_gpt2",
    "language_model_tied",
    "lora",
    "mixture_of_experts",
    "optimizer_adamw_fused",
    "optimizer_sgd_momentum_foreach",
    "own_adamw_fp32",
    "own_adamw_bf16",
    "own_adamw_8bit",
    "own_masters_8bit",
    "own_mixed",
    "sparse_gradients_sgd",
    "transformer_encoder",
    "unused_this_step",
    "writes_of_gradients",
    "adafactor_single",
]
"""Cases that the short run tries in every placement; the others only with everything on disk."""


OTHER_ACTIVATIONS = [
    "autocast",
    "blocks_with_random_numbers",
    "gradient_penalty",
    "hf_gpt2",
    "mixture_of_experts",
    "old_graph_after_step",
]
"""Cases that the short run tries with activations placed elsewhere."""


FAMILIES = (
    *("accumulation_", "add_param_group_", "after_step_", "averaged_", "checkpoint_", "clip_"),
    *("compile_", "dtype_", "eval_", "freeze_", "grad_scaler", "gradients_", "hf_"),
    *("language_model_", "optimizer_", "own_", "recurrent_", "scheduler_", "sparse_gradients_"),
    *("state", "transformer_", "weight_norm", "wide_", "written_by_user_"),
)
"""Cases that are much alike: of each family the short run has every fourth."""


def _stands_for_its_family(name: str) -> bool:
    family = next((f for f in FAMILIES if name.startswith(f)), None)
    return family is None or [n for n in CASES if n.startswith(family)].index(name) % 4 == 0


def _mark(name: str, placement: str) -> list[pytest.MarkDecorator]:
    is_short = placement == "disk" and _stands_for_its_family(name)
    is_short = is_short or (name in EVERY_PLACEMENT and placement != "params_ram")
    if placement in ACTIVATIONS:
        is_short = name in OTHER_ACTIVATIONS
    return [pytest.mark.slow] if CASES[name].slow or not is_short else []


NAMES = [
    pytest.param(name, marks=[] if name in EVERY_PLACEMENT else [pytest.mark.slow], id=name)
    for name in CASES
]
RUNS = [
    pytest.param(name, placement, marks=_mark(name, placement), id=f"{name}-{placement}")
    for name, case in CASES.items()
    for placement in case.every_placement
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


@pytest.mark.skipif(_init is None, reason="zeepo.init does not exist yet")
@pytest.mark.parametrize("num_pages", [1, 3, 7, 13, 29])
@pytest.mark.parametrize(
    "name", ["grad_scaler", "language_model_tied", "unused_this_step", "parameter_groups"]
)
def test_parity_with_some_room(name: str, num_pages: int, tmp_path: Path) -> None:
    """Between the least ram and ample ram every budget evicts something else at another moment."""
    report = check(CASES[name], "disk", tmp_path, extra_bytes=num_pages * PAGE_BYTES)
    assert report.differences == [], f"\n{report}"
