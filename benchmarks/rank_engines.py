"""One rank of one run of an engine: a GPT trained by plain PyTorch, its DDP or FSDP2, DeepSpeed or
zeepo. Only the engine that runs is imported: DeepSpeed has an environment of its own.

Every engine has the same model, batches and AdamW, in fp32 and without clipping. What an engine
lets its user choose is a `Configuration`; the benchmarks try each and keep the best.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

PEERS = ("ddp", "fsdp2", "deepspeed1", "deepspeed2", "deepspeed3")
ZEEPO = ("zeepo1", "zeepo2", "zeepo3")
LEARNING_RATE = 3e-4
DISK = "{disk}"
"""In the options of a configuration: a folder on the disk in question, which comes with a run."""


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
        """The engine without its stage and without what follows a hyphen."""
        name = self.engine.split("-")[0]
        return name if name == "fsdp2" else name.rstrip("0123")

    @property
    def stage(self) -> int | None:
        """None for an engine that trains on one rank only, without a process group."""
        found = re.search(r"\d", self.engine)
        return int(found[0]) if found else None

    def on(self, disk: str) -> Configuration:
        """With a folder for what is to be on disk."""
        return replace(self, options=_with_disk(self.options, disk))

    @property
    def label(self) -> str:
        return f"{self.engine}: {self.name}"


def _with_disk(value: Any, disk: str) -> Any:
    if isinstance(value, dict):
        return {key: _with_disk(item, disk) for key, item in value.items()}
    return disk if value == DISK else value


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
CPU = {"device": "cpu", "pin_memory": False}
NVME = {"device": "nvme", "nvme_path": DISK, "pin_memory": False, "buffer_count": 4}
FEW_LIVE = {
    "stage3_max_live_parameters": 1_000_000,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 10_000,
    "reduce_bucket_size": 5_000_000,
}
"""ZeRO-3 that keeps as little as it can."""


def _on_one_rank(engine: str, *named: tuple[str, dict[str, Any]]) -> list[Configuration]:
    """One rank has all the cores."""
    num_threads = os.cpu_count() or 1
    return [Configuration(engine, name, options, num_threads) for name, options in named]


def _deepspeed_offloaded(offload: dict[str, Any], engine: str) -> list[Configuration]:
    optimizer = {"offload_optimizer": offload, "overlap_comm": False}
    small = optimizer | {"sub_group_size": 20_000_000, "reduce_bucket_size": 20_000_000}
    return _on_one_rank(
        engine,
        ("optimizer, DeepSpeedCPUAdam", optimizer | {"optimizer": "cpu_adam"}),
        ("optimizer, groups of 20M", small | {"optimizer": "cpu_adam"}),
        ("optimizer, fused AdamW", small),
        ("and parameters, zero.Init", small | FEW_LIVE | {
            "optimizer": "cpu_adam", "zero_init": True, "offload_param": CPU,
        }),
    )  # fmt: skip


ONE_RANK: dict[str, list[Configuration]] = {
    "plain": _on_one_rank("plain", ("fused AdamW", {})),
    "fsdp2": _on_one_rank(
        "fsdp2",
        ("per block", {"blocks": 1, "reshard_after_forward": True}),
        ("per block, kept", {"blocks": 1, "reshard_after_forward": False}),
        ("per two blocks", {"blocks": 2, "reshard_after_forward": True}),
    ),
    "fsdp2-cpu": _on_one_rank(
        "fsdp2-cpu",
        ("per block", {"blocks": 1, "offload": True}),
        ("per two blocks", {"blocks": 2, "offload": True}),
        ("per block, kept", {"blocks": 1, "offload": True, "reshard_after_forward": False}),
    ),
    **{
        f"deepspeed{stage}": [
            replace(configuration, num_threads=os.cpu_count() or 1)
            for configuration in _deepspeed(stage)[:-1]
        ]
        for stage in (1, 2, 3)
    },
    "deepspeed3-cpu": _deepspeed_offloaded(CPU, "deepspeed3-cpu"),
    "deepspeed3-nvme": _deepspeed_offloaded(NVME, "deepspeed3-nvme"),
    "zeepo": _on_one_rank("zeepo", ("in RAM", {})),
    "zeepo-disk": _on_one_rank("zeepo-disk", ("on disk", {"disk": DISK})),
}
"""Engines on one rank, with their configurations."""
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


def set_up_plain(build: Callable[[], Any], configuration: Configuration) -> Step:
    model = build()
    return plain_step(model, adamw(model))


def set_up_ddp(build: Callable[[], Any], configuration: Configuration) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(build(), **configuration.options)
    return plain_step(model, adamw(model))


def set_up_fsdp2(build: Callable[[], Any], configuration: Configuration) -> Step:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    options = dict(configuration.options)
    is_on_meta = options.pop("meta", False)
    if options.pop("offload", False):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    with torch.device("meta" if is_on_meta else "cpu"):
        model = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    together = options.pop("blocks")
    blocks = list(model.blocks)
    for first in range(0, len(blocks), together):
        group = blocks[first : first + together]
        fully_shard(group if together > 1 else group[0], mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if is_on_meta:
        model.to_empty(device="cpu")
        for name, parameter in model.named_parameters():
            local = parameter.data.to_local()
            local.fill_(1.0) if "norm" in name and "weight" in name else local.normal_(std=0.02)
    return plain_step(model, adamw(model))


def set_up_deepspeed(build: Callable[[], Any], configuration: Configuration) -> Step:
    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed(dist_backend="gloo")
    options = dict(configuration.options)
    optimizer_name = options.pop("optimizer", "fused")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": dist.get_world_size(),
        "gradient_clipping": 0.0,  # it clips at 1.0 unless told otherwise
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": configuration.stage},
    }
    is_built_split = options.pop("zero_init", False)
    config["zero_optimization"] |= options  # type: ignore[operator]
    if is_built_split:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = build()
    else:
        model = build()
    optimizer = adamw(model)
    if optimizer_name == "cpu_adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(
            model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, adamw_mode=True
        )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(tokens: Any) -> float:
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return step


def set_up_zeepo(build: Callable[[], Any], configuration: Configuration) -> Step:
    import zeepo

    options = dict(configuration.options)
    if options.pop("lazy", False):
        with zeepo.lazy(ram=options["ram"], disk=options["disk"]):
            model = build()
    else:
        model = build()
    optimizer = adamw(model)
    if configuration.stage is not None:
        options["stage"] = configuration.stage
    session = zeepo.init(model, optimizer, **options)
    step = plain_step(model, optimizer)
    step.bill = lambda: session.plan.items()  # type: ignore[attr-defined]
    return step


SET_UP = {
    "plain": set_up_plain,
    "ddp": set_up_ddp,
    "fsdp2": set_up_fsdp2,
    "deepspeed": set_up_deepspeed,
    "zeepo": set_up_zeepo,
}


IMPORTED = {
    "zeepo": "zeepo",
    "deepspeed": "deepspeed",
    "fsdp2": "torch.distributed.fsdp",
    "ddp": "torch.nn.parallel",
}
"""What an engine's user imports, which is there before anything is counted."""


def wait_at_gate() -> None:
    """Tell that everything is imported, and wait until somebody has set the memory's limit."""
    print("imported", flush=True)
    sys.stdin.readline()


def train(configuration: Configuration, job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Losses, seconds and memory of one rank; the process group is open."""
    import torch
    from gpt import GPT, GPTConfig

    __import__(IMPORTED.get(configuration.kind, "torch"))
    shape = GPTConfig(**job["model"])
    resident = memory_bytes("VmRSS")
    if job.get("has_gate"):
        wait_at_gate()

    def build() -> Any:
        torch.manual_seed(0)
        return GPT(shape)

    started = time.perf_counter()
    step = SET_UP[configuration.kind](build, configuration)
    set_up_seconds = time.perf_counter() - started
    set_up_peak = memory_bytes("VmHWM")
    forget_peak()
    random = torch.Generator().manual_seed(1 + rank)
    losses, seconds = [], []
    batch_shape = (job.get("batch", 1), shape.sequence + 1)
    for _ in range(job["num_steps"]):
        tokens = torch.randint(shape.vocabulary, batch_shape, generator=random)
        started = time.perf_counter()
        losses.append(step(tokens).hex())
        seconds.append(round(time.perf_counter() - started, 3))
    return {
        "losses": losses,
        "seconds": seconds,
        "set_up_seconds": round(set_up_seconds, 3),
        "resident_after_import": resident,
        "peak_of_set_up": set_up_peak,
        "peak_of_steps": memory_bytes("VmHWM"),
        "bill": step.bill() if hasattr(step, "bill") else {},
    }


def main() -> None:
    """rank_engines.py JOB.json RANK: the job is written by engine_runs.py and largest_model.py."""
    job_path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(job_path.read_text())
    configuration = Configuration(**job["configuration"])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(configuration.num_threads)
    has_group = configuration.stage is not None or configuration.kind == "ddp"
    if has_group:
        store = dist.FileStore(str(job_path.parent / "store"), job["num_ranks"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job["num_ranks"])
    facts = train(configuration, job, rank)
    (job_path.parent / f"facts{rank}.json").write_text(json.dumps(facts))
    if has_group:
        dist.barrier()
    os._exit(0)  # giving everything back is not the question here


def written(configuration: Configuration) -> dict[str, Any]:
    """As JSON has it."""
    return asdict(configuration)


if __name__ == "__main__":
    main()
