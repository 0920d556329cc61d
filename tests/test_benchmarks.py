"""What the benchmarks reckon with, where it can be checked without measuring."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

Load = Callable[[str], ModuleType]
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports a benchmark as its own folder does."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)

    def by_name(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield by_name
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).parent == BENCHMARKS:
            del sys.modules[name]


@pytest.mark.parametrize("start", [0, 3, 11])
@pytest.mark.parametrize("highest", [-1, 0, 5, 10, 11])
def test_search_finds_the_highest_rung(load: Load, start: int, highest: int) -> None:
    tried: list[int] = []

    def survives(place: int) -> bool:
        assert 0 <= place < 12
        tried.append(place)
        return place <= highest

    assert load("ladder").search(survives, 12, start) == highest
    assert len(tried) == len(set(tried)) <= 8


def test_another_configuration_has_to_beat_the_best(load: Load) -> None:
    tried: list[int] = []
    found = load("ladder").search(lambda place: bool(tried.append(place)), 12, 6, 5)
    assert (found, tried) == (5, [6])


def test_rungs_have_the_parameters_they_say(load: Load) -> None:
    import torch

    rungs = load("ladder").ladder(1e8, 4.6e9)
    gpt = load("gpt")
    for rung in rungs:
        with torch.device("meta"):
            model = gpt.GPT(gpt.GPTConfig(**rung.options))
        assert sum(p.numel() for p in model.parameters()) == rung.num_parameters
    sizes = [rung.num_parameters for rung in rungs]
    assert all(1.1 < b / a < 1.4 for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    ("code", "said", "is_late", "outcome"),
    [
        (-9, "", False, "killed"),
        (-9, "", True, "too slow"),
        (1, "zeepo.errors.BudgetError: needs more", False, "refused: zeepo.errors.BudgetError"),
        (1, "RuntimeError: no", False, "failed: RuntimeError: no"),
        (0, "", False, "loss not finite"),
    ],
)
def test_outcomes(load: Load, code: int, said: str, is_late: bool, outcome: str) -> None:
    facts = {"losses": ["nan"]}
    assert load("largest_model").outcome_of(code, facts, said, is_late).startswith(outcome)


def test_a_survivor_has_finite_losses(load: Load) -> None:
    facts = {"losses": [(1.5).hex()]}
    assert load("largest_model").outcome_of(0, facts, "", False) == "survived"


def test_a_folder_comes_with_the_run(load: Load) -> None:
    engines = load("rank_engines")
    for configuration in engines.ONE_RANK["deepspeed3-nvme"]:
        placed = configuration.on("/somewhere").options
        assert placed["offload_optimizer"]["nvme_path"] == "/somewhere"


def test_what_a_step_has_to_move(load: Load) -> None:
    moved, gpt = load("bytes_moved"), load("gpt")
    model = gpt.GPT(gpt.GPTConfig(num_layers=1, width=8, num_heads=1, vocabulary=10, sequence=4))
    nbytes = sum(4 * p.numel() for p in model.parameters())
    tables = moved.formula(model)
    assert (tables["general"]["read"], tables["general"]["written"]) == (5 * nbytes, 4 * nbytes)
    # tokens (320 bytes): parameter not in backward, gradient stays; positions (128); head (320).
    assert tables["this model"]["read"] == 5 * nbytes - 320 - 128 - 320 - 320
    assert tables["this model"]["written"] == 4 * nbytes - 320


def test_buffers_hold_the_largest_parameter(load: Load) -> None:
    ladder = load("ladder")
    rung = ladder.Rung(512)
    named = {"offload_param": {"buffer_size": ladder.LARGEST}, "stage": 3}
    assert ladder.fitted(named, rung)["offload_param"]["buffer_size"] == 50304 * 512
