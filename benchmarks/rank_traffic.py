"""How many bytes do two ranks send in a step? By the network interfaces' own counters.

Each rank runs in a network namespace of its own (root is needed), with a cable between them. After
two steps to warm up, the bytes that the interface has sent are compared with what the links gave to
the transport (headers and beats included), with `session.stats()["bytes_sent"]`, and with what ZeRO
takes: 2P(N-1)/N elements per rank in stages 1 and 2, 3P(N-1)/N in stage 3 (parameters are gathered
again in backward, but for the last few units of the forward, which are still there). The interface
counts a header for each packet that it is given, which may be as large as 64 KiB (segmentation is
left to the hardware), so the overhead on a real wire with packets of 1500 bytes is some 4 % more.
Writes a JSON.

    python benchmarks/rank_traffic.py [--width 256 --depth 64 --steps 6] [--result FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import reporting

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.dist.faults import Nursery  # noqa: E402
from tests.dist.hosts import TwoHosts, can_make_hosts  # noqa: E402

NUM_RANKS = 2
STAGES = (0, 1, 2, 3)
ELEMENT_BYTES = 4
LIMIT_SECONDS = 300.0


def takes_elements(stage: int, numel: int) -> float:
    """What a rank has to send in a step, as ZeRO is described; stage 0 as an all-reduce."""
    return (3 if stage == 3 else 2) * numel * (NUM_RANKS - 1) / NUM_RANKS


def measure(nursery: Nursery, folder: Path, stage: int, **options: Any) -> dict[str, Any]:
    """One run; figures are bytes per step and rank, averaged over the ranks."""
    with TwoHosts() as two_hosts:
        ranks = nursery.start(
            NUM_RANKS,
            folder / str(stage),
            "traffic",
            hosts=two_hosts.hosts,
            stage=stage,
            interface=TwoHosts.INTERFACE,
            piece_bytes=32 << 20,
            patience=60.0,
            **options,
        )
        for rank in ranks:
            if not rank.wait(LIMIT_SECONDS) or rank.exit_code:
                raise SystemExit(f"rank {rank.number} failed:\n{rank.stderr}")
    results = [rank.result for rank in ranks]
    numel = results[0]["numel"]
    per_step = {
        key: sum(result["per_step"].get(key, 0.0) for result in results) / NUM_RANKS
        for key in {key for result in results for key in result["per_step"]}
    }
    counted = sum(nbytes for key, nbytes in per_step.items() if key not in ("wire", "links"))
    expected = takes_elements(stage, numel) * ELEMENT_BYTES
    return {
        "numel": numel,
        "wire_bytes": per_step["wire"],
        "link_bytes": per_step["links"],
        "counted_bytes": counted,
        "counted_by_kind": {k: v for k, v in per_step.items() if k not in ("wire", "links")},
        "expected_bytes": expected,
        "counted_elements_per_parameter": counted / ELEMENT_BYTES / numel,
        "wire_over_counted": per_step["wire"] / counted,
        "wire_over_expected": per_step["wire"] / expected,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--result", default=str(ROOT / "benchmarks/results/rank_traffic.json"))
    args = parser.parse_args()
    if not can_make_hosts():
        raise SystemExit("network namespaces need root and the command ip")
    results = {}
    options = {"width": args.width, "depth": args.depth, "num_steps": args.steps}
    with tempfile.TemporaryDirectory() as folder, Nursery() as nursery:
        for stage in STAGES:
            found = results[stage] = measure(nursery, Path(folder), stage, **options)
            print(
                f"stage {stage}: wire {found['wire_bytes'] / 1e6:7.2f} MB a step and rank, counted "
                f"{found['counted_bytes'] / 1e6:7.2f} MB "
                f"({found['counted_elements_per_parameter']:.3f} P elements), expected "
                f"{found['expected_bytes'] / 1e6:7.2f} MB; the protocol adds "
                f"{100 * (found['wire_over_counted'] - 1):.2f} %",
                flush=True,
            )
    report = reporting.new_report(
        "bytes on the wire in a step of two ranks on two hosts",
        ranks=NUM_RANKS,
        model=options,
        stages=results,
    )
    reporting.write(report, Path(args.result))


if __name__ == "__main__":
    main()
