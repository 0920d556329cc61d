"""Every kind of model and training loop on several ranks: the bits of the reference, in every stage
and tier, and the bytes really moved.

The reference is plain PyTorch whose gradients are averaged in the order of the ranks, and at two
ranks torch's DDP as well, for the programs it can run. One rank is what tests/parity is about; here
it only has a process group around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.dist.loops import accumulate_under_ddp, accumulate_under_zeepo
from tests.dist.programs import Way, on_rank
from tests.dist.ranks import Ranks
from zeepo.verify.record import Record, compare

SLOW = pytest.mark.slow
PIECES = 1 << 10
"""Updates in pieces this small, on disk: another size of what is moved at once."""
SECONDS = 90.0
ULP = 2.0**-23

EVERY_WAY = [
    Way(stage, where, PIECES if where == "disk" else 32 << 20)
    for stage in (0, 1, 2, 3)
    for where in ("ram", "disk", "params_ram", "grads_ram")
]
SHORT = [
    ("unused_this_step", 2, Way(3, "disk", PIECES)),
    ("convolution", 2, Way(2, "params_ram")),
    ("mixture_of_experts", 2, Way(3, "ram")),
    ("accumulation_never_zeroed", 2, Way(1, "disk")),
    ("plain_perceptron_adamw", 3, Way(3, "grads_ram")),
    ("module_called_several_times", 3, Way(0, "disk")),
    ("parameter_groups", 3, Way(2, "ram")),
    ("several_losses", 2, Way(3, "disk", PIECES)),
    ("mixture_of_experts", 2, Way(1, "disk")),
]
"""The most different ones."""

IN_EVERY_WAY = ["plain_perceptron_adamw", "unused_this_step", "convolution", "transformer_encoder"]

LIKE_DDP = [
    "language_model_own",
    "language_model_tied",
    "language_model_borrowed",
    "transformer_encoder",
    "multihead_attention",
    "recurrent_lstm",
    "convolution",
    "mixture_of_experts",
    "checkpoint_non_reentrant",
    "module_called_several_times",
    "containers_and_tiny_parameters",
    "unused_this_step",
    "never_used",
    "lora",
    "tied_between_blocks",
    "eval_between_steps_no_grad",
    "dropout_random_state",
    "weight_norm",
    "channels_last",
    "custom_function",
    "gradient_penalty",
    "hessian_vector_product",
    "exception_in_forward",
    "closure",
    "optimizer_adamw_fused",
    "optimizer_adam_foreach",
    "optimizer_sgd_momentum_foreach",
    "optimizer_rmsprop_centered_momentum_single",
    "optimizer_adagrad_fused",
    "optimizer_nadam_foreach",
    "optimizer_radam_single",
    "optimizer_adamax_foreach",
    "optimizer_adadelta_single",
    "optimizer_asgd_foreach",
    "optimizer_rprop_single",
    "tensor_learning_rate_fused",
    "wide_parameters_adamw_fused",
    "parameter_groups",
    "scheduler_cosine_after_init",
    "clip_grad_value",
    "plain_perceptron_adamw",
    "gan",
]
"""Programs that DDP can run: a backward for each forward, gradients begun anew, whole models."""
BY_HAND = [
    "accumulation_set_to_none_false",
    "accumulation_never_zeroed",
    "several_losses",
    "retain_graph_twice",
    "checkpoint_reentrant",
    "two_optimizers_one_model",
    "optimizer_knows_a_part",
    "backward_inputs",
    "dtypes_mixed",
]
"""Programs it cannot, or that it rounds otherwise: gradients reduced before are added to."""
WITH_CLIPPING = [
    "clip_grad_norm_2_foreach_none",
    "clip_grad_norm_1_foreach_none",
    "clip_grad_norm_inf_foreach_none",
    "hf_gpt2",
    "hf_llama",
    "hf_llama_checkpoint_non_reentrant",
    "hf_t5",
    "hf_mixtral",
    "hf_bert",
]
"""Programs that clip: in every step they show the loss and the norm."""

_expected: dict[tuple[str, int, str], list[Record]] = {}


def reference(ranks: Ranks, name: str, num_ranks: int, kind: str = "by hand") -> list[Record]:
    """What each rank shall show; run once."""
    key = (name, num_ranks, kind)
    if key not in _expected:
        _expected[key] = ranks.run(num_ranks, on_rank, name, kind, seconds=SECONDS)
    return _expected[key]


def assert_same(expected: Sequence[Record], actual: Sequence[Record]) -> None:
    """Every loss, value read, parameter, gradient and optimizer state, on every rank."""
    for rank, (theirs, ours) in enumerate(zip(expected, actual, strict=True)):
        differences = [f"rank {rank}: {difference}" for difference in compare(theirs, ours)]
        assert differences == []
        assert ours.problems == []


def assert_moved(way: Way, records: Sequence[Record]) -> None:
    """What the way says really happened on every rank."""
    for rank, record in enumerate(records):
        stats = record.stats
        assert len(record.after_close) > 0, "no session was started"
        if way.uses_disk:
            assert stats["evictions"] >= 2, f"rank {rank} evicted nothing"
            assert stats["bytes_moved"]["ram->disk"] > 0
        if len(records) > 1:
            assert stats["bytes_received"].get("grads", 0) > 0, f"rank {rank} reduced nothing"
        if way.stage in (1, 2, 3) and len(records) > 1:
            assert stats["bytes_received"].get("params", 0) > 0, f"rank {rank} gathered nothing"


def run(ranks: Ranks, name: str, num_ranks: int, way: Way, disk: Path) -> list[Record]:
    records = ranks.run(num_ranks, on_rank, name, way, str(disk), seconds=SECONDS)
    assert_moved(way, records)
    return records


@pytest.mark.parametrize(("name", "num_ranks", "way"), SHORT, ids=str)
def test_program(ranks: Ranks, tmp_path: Path, name: str, num_ranks: int, way: Way) -> None:
    actual = run(ranks, name, num_ranks, way, tmp_path)
    assert_same(reference(ranks, name, num_ranks), actual)
    if num_ranks == 2 and name in LIKE_DDP:
        assert_same(reference(ranks, name, 2, "ddp"), actual)


@SLOW
@pytest.mark.parametrize("way", [Way(3, "disk", PIECES), Way(2, "ram")], ids=str)
@pytest.mark.parametrize("name", [*LIKE_DDP, *BY_HAND])
def test_every_program(ranks: Ranks, tmp_path: Path, name: str, way: Way) -> None:
    actual = run(ranks, name, 2, way, tmp_path)
    assert_same(reference(ranks, name, 2), actual)
    if name in LIKE_DDP:
        assert_same(reference(ranks, name, 2, "ddp"), actual)


@SLOW
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("way", EVERY_WAY, ids=str)
@pytest.mark.parametrize("name", IN_EVERY_WAY)
def test_every_way(ranks: Ranks, tmp_path: Path, name: str, way: Way, num_ranks: int) -> None:
    actual = run(ranks, name, num_ranks, way, tmp_path)
    assert_same(reference(ranks, name, num_ranks), actual)


@SLOW
@pytest.mark.parametrize("name", IN_EVERY_WAY)
def test_one_rank_is_plain(ranks: Ranks, tmp_path: Path, name: str) -> None:
    way = Way(3, "disk", PIECES)
    assert_same(reference(ranks, name, 1, "plain"), run(ranks, name, 1, way, tmp_path))


@SLOW
@pytest.mark.parametrize("name", WITH_CLIPPING)
def test_clipping(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """The norm is the same in every stage and tier, and within 2 ulp of DDP's."""
    ours = run(ranks, name, 2, Way(0, "ram"), tmp_path)
    for way in (Way(1, "ram"), Way(2, "disk", PIECES), Way(3, "disk"), Way(3, "ram")):
        assert_same(ours, run(ranks, name, 2, way, tmp_path))
    theirs = reference(ranks, name, 2, "ddp")
    for rank in range(2):
        expected, actual = _first_norm(theirs[rank]), _first_norm(ours[rank])
        assert abs(actual - expected) <= 2 * ULP * expected


def _first_norm(record: Record) -> float:
    """Of the step in which all gradients are still the same."""
    norm = dict(record.observations)["loss[0].1"].elements()
    assert norm is not None
    return norm.item()


@pytest.mark.parametrize(
    ("optimizer", "way"),
    [
        ("adamw", Way(3, "disk", PIECES)),
        pytest.param("sgd", Way(2, "params_ram"), marks=SLOW),
        pytest.param("sgd", Way(1, "ram"), marks=SLOW),
        pytest.param("adamw", Way(0, "ram"), marks=SLOW),
    ],
    ids=str,
)
def test_no_sync_and_lazy(ranks: Ranks, tmp_path: Path, optimizer: str, way: Way) -> None:
    """Built lazily from another seed on every rank, accumulated under no_sync: DDP's bits."""
    expected = ranks.run(2, accumulate_under_ddp, optimizer, seconds=SECONDS)
    actual = ranks.run(2, accumulate_under_zeepo, optimizer, way, str(tmp_path), seconds=SECONDS)
    assert_same(expected, actual)
    assert_moved(way, actual)
