"""One rank of one run of benchmarks/rank_peers.py: a GPT trained by torch's DDP, FSDP2, DeepSpeed
or zeepo. Only the engine that runs is imported: DeepSpeed has an environment of its own.

Every engine has the same model, batches and AdamW (fused), in fp32 and without clipping. What an
engine lets its user choose is a `Configuration`; the benchmark tries each and keeps the best.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PEERS = ("ddp", "fsdp2", "deepspeed1", "deepspeed2", "deepspeed3")
ZEEPO = ("zeepo1", "zeepo2", "zeepo3")
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Configuration:
    """One way to run an engine."""

    engine: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    num_threads: int = 1
    """OpenMP threads of each rank."""

    @property
    def kind(self) -> str:
        """The engine without its stage."""
        return self.engine if self.engine == "fsdp2" else self.engine.rstrip("0123")

    @property
    def stage(self) -> int:
        return int(self.engine[-1])

    @property
    def label(self) -> str:
        return f"{self.engine}: {self.name}"


def _of(engine: str, *named: tuple[str, dict[str, Any]]) -> list[Configuration]:
    """At one thread each; the first also at two, which may fill the gaps of communication."""
    single = [Configuration(engine, name, options) for name, options in named]
    return [*single, Configuration(engine, f"{named[0][0]}, 2 threads", named[0][1], 2)]


def _deepspeed(stage: int) -> list[Configuration]:
    plain = {"overlap_comm": False, "contiguous_gradients": True}
    large = {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
    small = {"reduce_bucket_size": 20_000_000, "allgather_bucket_size": 20_000_000}
    named = [
        ("buckets of 500M", plain | large),
        ("buckets of 20M", plain | small),
        ("overlapped, 50M", {"overlap_comm": True, "reduce_bucket_size": 50_000_000}),
        ("not contiguous", {"overlap_comm": False, "contiguous_gradients": False} | large),
    ]
    if stage == 3:
        prefetch = {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 10_000}
        named = [(name, {k: v for k, v in o.items() if "allg" not in k}) for name, o in named[:3]]
        named.append(("no prefetch", plain | prefetch))
        named.append(("zero.Init", plain | {"zero_init": True}))
    return _of(f"deepspeed{stage}", *named)


CONFIGURATIONS: dict[str, list[Configuration]] = {
    "ddp": _of(
        "ddp",
        ("buckets of 25 MB", {}),
        ("buckets of 100 MB", {"bucket_cap_mb": 100}),
        ("gradients in buckets", {"gradient_as_bucket_view": True}),
        ("static graph", {"gradient_as_bucket_view": True, "static_graph": True}),
    ),
    "fsdp2": _of(
        "fsdp2",
        ("per block", {"blocks": 1, "reshard_after_forward": True}),
        ("per block, kept", {"blocks": 1, "reshard_after_forward": False}),
        ("per two blocks", {"blocks": 2, "reshard_after_forward": True}),
    ),
    **{f"deepspeed{stage}": _deepspeed(stage) for stage in (1, 2, 3)},
    **{f"zeepo{stage}": [Configuration(f"zeepo{stage}", "in RAM")] for stage in (0, 1, 2, 3)},
}
Step = Callable[[Any], float]


def memory_bytes(name: str) -> int:
    """VmRSS or VmHWM of this process."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def forget_peak() -> None:
    """VmHWM starts again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def plain_step(model: Any, optimizer: Any) -> Step:
    def step(tokens: Any) -> float:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def set_up_ddp(build: Callable[[], Any], configuration: Configuration) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(build(), **configuration.options)
    return plain_step(model, adamw(model))


def set_up_fsdp2(build: Callable[[], Any], configuration: Configuration) -> Step:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build()
    options = dict(configuration.options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    together = options.pop("blocks")
    blocks = list(model.blocks)
    for first in range(0, len(blocks), together):
        group = blocks[first : first + together]
        fully_shard(group if together > 1 else group[0], mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return plain_step(model, adamw(model))


def set_up_deepspeed(build: Callable[[], Any], configuration: Configuration) -> Step:
    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed(dist_backend="gloo")
    options = dict(configuration.options)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": dist.get_world_size(),
        "gradient_clipping": 0.0,  # it clips at 1.0 unless told otherwise
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": configuration.stage},
    }
    if options.pop("zero_init", False):
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = build()
    else:
        model = build()
    config["zero_optimization"] |= options  # type: ignore[operator]
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)

    def step(tokens: Any) -> float:
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return step


def set_up_zeepo(build: Callable[[], Any], configuration: Configuration) -> Step:
    import zeepo

    model = build()
    optimizer = adamw(model)
    session = zeepo.init(model, optimizer, stage=configuration.stage, **configuration.options)
    step = plain_step(model, optimizer)
    step.bill = lambda: session.plan.items()  # type: ignore[attr-defined]
    return step


SET_UP = {
    "ddp": set_up_ddp,
    "fsdp2": set_up_fsdp2,
    "deepspeed": set_up_deepspeed,
    "zeepo": set_up_zeepo,
}


def train(
    configuration: Configuration, model_options: dict[str, Any], num_steps: int, rank: int
) -> dict[str, Any]:
    """Losses, seconds and memory of one rank; the process group is open."""
    import torch
    from gpt import GPT, GPTConfig

    if configuration.kind in ("zeepo", "deepspeed"):
        __import__(configuration.kind)
    shape = GPTConfig(**model_options)
    resident = memory_bytes("VmRSS")

    def build() -> Any:
        torch.manual_seed(0)
        return GPT(shape)

    step = SET_UP[configuration.kind](build, configuration)
    set_up_peak = memory_bytes("VmHWM")
    forget_peak()
    random = torch.Generator().manual_seed(1 + rank)
    losses, seconds = [], []
    for _ in range(num_steps):
        tokens = torch.randint(shape.vocabulary, (1, shape.sequence + 1), generator=random)
        started = time.perf_counter()
        losses.append(step(tokens).hex())
        seconds.append(round(time.perf_counter() - started, 3))
    return {
        "losses": losses,
        "seconds": seconds,
        "resident_after_import": resident,
        "peak_of_set_up": set_up_peak,
        "peak_of_steps": memory_bytes("VmHWM"),
        "bill": step.bill() if hasattr(step, "bill") else {},
    }


def main() -> None:
    """rank_engines.py JOB.json RANK: the job is written by rank_peers.py."""
    job_path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(job_path.read_text())
    configuration = Configuration(**job["configuration"])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(configuration.num_threads)
    store = dist.FileStore(str(job_path.parent / "store"), job["num_ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job["num_ranks"])
    facts = train(configuration, job["model"], job["num_steps"], rank)
    (job_path.parent / f"facts{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    os._exit(0)  # giving everything back is not the question here


def written(configuration: Configuration) -> dict[str, Any]:
    """As JSON has it."""
    return asdict(configuration)


if __name__ == "__main__":
    main()
