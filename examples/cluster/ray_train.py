"""The same training under Ray Train: its TorchTrainer starts the ranks, zeepo finds them.

Ray makes the process group before it calls `train_on_worker`, so `zeepo.init` need not be told of
anything. Every worker reports the mean loss of all; Ray keeps what the first one says.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer
from train import build, loss_of

import zeepo

WEIGHTS = "model.pt"


def train_on_worker(settings: dict[str, Any]) -> None:
    """What every worker runs."""
    model, optimizer = build()
    with zeepo.init(model, optimizer, stage=3):
        for step in range(settings["steps"]):
            loss = loss_of(model, step, dist.get_rank())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            metrics = {"step": step, "loss": mean.item()}
            ray.train.report(metrics)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:  # after the session every rank has all of the model
            torch.save(model.state_dict(), Path(folder, WEIGHTS))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def main() -> None:
    """Start the workers, wait for them, and print what they reported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--storage", type=Path, required=True, help="folder for results")
    arguments = parser.parse_args()
    storage = arguments.storage.absolute()
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"steps": arguments.steps},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=arguments.workers),
        run_config=ray.train.RunConfig(name="zeepo", storage_path=str(storage)),
    )
    result = trainer.fit()
    print(
        f"step {result.metrics['step']}, {arguments.workers} ranks, loss {result.metrics['loss']!r}"
    )
    print(f"weights: {Path(result.checkpoint.path, WEIGHTS)}")


if __name__ == "__main__":
    main()
