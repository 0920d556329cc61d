"""The picture of docs/how.md: which chunks are in RAM while a real step goes by.

    python docs/step_picture.py docs/step.png

It trains eight layers at a small budget and looks at the store after each layer's forward and
backward. The store is not public: this is a look behind the curtain, not a way to use zeepo.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed
import torch
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

import zeepo
from zeepo.chunks.chunk import Kind

NUM_LAYERS, WIDTH = 8, 1024
WARM_STEPS = 3
COLOURS = {"params": "#1f5fa8", "grads": "#b4531a", "optimizer state": "#3f8f4f"}
NAMES = {"params": "parameters", "grads": "gradients", "optimizer state": "optimizer state"}
Column = tuple[str, str, set[tuple[str, int]]]
"""Phase, layer, and what is in RAM."""


def watch_a_step(disk: str) -> list[Column]:
    """What is in RAM after each moment of one step and the forward after it."""
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with zeepo.init(model, optimizer, ram="1GiB", disk=disk) as session:
        least = session.plan.minimum_ram
    columns: list[Column] = []
    with zeepo.init(model, optimizer, ram=least, disk=disk) as session:
        for _ in range(WARM_STEPS):
            _forward(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        with _watched(model, session, columns):
            _forward(model).backward()
            optimizer.step()
            columns.append(("step", "", _resident(session)))
            optimizer.zero_grad()
            _forward(model)
    return columns


def _forward(model: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(8, WIDTH)).square().mean()
    return loss


@contextmanager
def _watched(model: torch.nn.Module, session: Any, columns: list[Column]) -> Iterator[None]:
    def after_forward(layer: str) -> Any:
        def look(*_: Any) -> None:
            is_next = any(phase == "step" for phase, _, _ in columns)
            phase = "next forward" if is_next else "forward"
            columns.append((phase, layer, _resident(session)))

        return look

    def after_backward(layer: str) -> Any:
        return lambda _: columns.append(("backward", layer, _resident(session)))

    handles = []
    for name, layer in model.named_children():
        handles.append(layer.register_forward_hook(after_forward(name)))
        hook = after_backward(name)
        handles.append(layer.weight.register_post_accumulate_grad_hook(hook))
    yield
    for handle in handles:
        handle.remove()


def _resident(session: Any) -> set[tuple[str, int]]:
    found = set()
    for chunk in session._store.moves.chunks.values():
        if chunk.is_resident and isinstance(chunk.kind, Kind):
            found.add((chunk.kind.value, int(chunk.label.split(".")[0].split(" ")[0])))
    return found


def draw(columns: list[Column], path: Path) -> None:
    """Rows are chunks, columns moments; a filled cell is in RAM, an empty one on disk."""
    figure, axes = plt.subplots(figsize=(9, 5), dpi=160, layout="constrained")
    rows = [(tag, layer) for tag in COLOURS for layer in range(NUM_LAYERS)]
    for x, (_, _, resident) in enumerate(columns):
        for y, (tag, layer) in enumerate(rows):
            filled = (tag, layer) in resident
            colour = COLOURS[tag] if filled else "#eeeeee"
            axes.add_patch(plt.Rectangle((x + 0.06, y + 0.06), 0.88, 0.88, color=colour, lw=0))
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)
    axes.set_yticks([y + 0.5 for y in range(len(rows))], [str(layer) for _, layer in rows])
    axes.set_xticks([x + 0.5 for x in range(len(columns))], [name for _, name, _ in columns])
    axes.tick_params(length=0, labelsize=7)
    axes.set_xlabel("time: after the forward or backward of which layer")
    for spine in axes.spines.values():
        spine.set_visible(False)
    for number, tag in enumerate(COLOURS):
        middle = (number + 0.5) * NUM_LAYERS
        axes.text(-1.3, middle, NAMES[tag], rotation=90, ha="center", va="center", fontsize=9)
        axes.axhline(number * NUM_LAYERS, color="white", lw=3)
    for phase in dict.fromkeys(phase for phase, _, _ in columns):
        places = [x for x, (name, _, _) in enumerate(columns) if name == phase]
        axes.text(sum(places) / len(places) + 0.5, -0.4, phase, ha="center", fontsize=9)
        axes.axvline(places[0], color="#333333", lw=0.8)
    handles = [Patch(color=colour, label=f"{NAMES[t]} in RAM") for t, colour in COLOURS.items()]
    handles.append(Patch(color="#eeeeee", label="on disk, or not there yet"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        draw(watch_a_step(folder), Path(sys.argv[1]))
