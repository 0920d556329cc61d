"""The command: `make demo`, or `python -m examples.demo` from the repository's root."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.demo import report
from examples.demo.progress import Display
from examples.demo.text import Tokenizer, standard_library
from examples.demo.watch import ROOT, GiB, MiB, Run, run_and_watch

FULL: dict[str, Any] = {
    "layers": 12,
    "width": 896,
    "heads": 14,
    "vocabulary": 24576,
    "sequence": 256,
    "batch": 1,
    "steps": 12,
    "lr": 1e-3,
    "share": 0.25,
    "ram": None,  # this share of what the plain run grew by
    "text_bytes": None,  # all of it
}
SMALL = FULL | {
    "layers": 4,
    "width": 384,
    "heads": 6,
    "vocabulary": 2048,
    "sequence": 32,
    "steps": 3,
    "share": None,  # torch's own growth is larger than this model: memory is shown, not judged
    "ram": "192MiB",
    "text_bytes": 1 << 18,
}
SHAPE = ("layers", "width", "heads", "vocabulary", "sequence", "batch", "steps", "lr")

HEADER = (
    "[bold]zeepo demo[/]: one GPT, trained twice on the same batches, each in a process of its "
    "own: first by plain PyTorch, then by zeepo with [bold]{budget}[/] and the rest on disk. "
    "{layers} layers, width {width}, vocabulary {vocabulary:,}, {batch} x {sequence} tokens a "
    "step, {steps} steps; fused AdamW and activation checkpointing in both. About {minutes}.\n"
)


def write_tokens(path: Path, settings: dict[str, Any], display: Display) -> None:
    """Read the text, learn the vocabulary, write the tokens that both runs read."""
    with display.busy("reading the standard library's sources"):
        text = standard_library()[: settings["text_bytes"]]
        tokenizer = Tokenizer.of(text, settings["vocabulary"])
        tokens = tokenizer.encode(text)
        tokens.tofile(path)
    display.say(
        f"text: {len(text) / 1e6:.1f} MB of the Python standard library, {len(tokens):,} tokens"
    )


def train_both(settings: dict[str, Any], disk: Path, display: Display) -> tuple[Run, Run]:
    """One after the other, so that the speeds mean something."""
    tokens, scratch = disk / "tokens", disk / "scratch"
    scratch.mkdir()
    write_tokens(tokens, settings, display)
    shape = [f"--{name}={settings[name]}" for name in SHAPE]
    shape += [f"--tokens={tokens}", f"--disk={scratch}", "--seed=0"]
    num_steps = settings["steps"]
    with display.run("plain", num_steps) as changed:
        plain = run_and_watch("plain", num_steps, [*shape, "--ram=0"], changed)
    if settings["ram"] is None:
        settings["ram"] = f"{int(settings['share'] * plain.growth_bytes / MiB)}MiB"
        display.say(
            f"plain grew by {plain.growth_bytes / GiB:.2f} GiB; "
            f'zeepo gets {settings["share"]:.0%} of that: ram="{settings["ram"]}"'
        )
    with display.run("zeepo", num_steps) as changed:
        zeepo = run_and_watch("zeepo", num_steps, [*shape, f"--ram={settings['ram']}"], changed)
    return plain, zeepo


def conclude(result: dict[str, Any], args: argparse.Namespace) -> int:
    """Show and write what came out; the exit code."""
    from examples.demo import plot  # matplotlib takes a second: not before the runs

    console = Console()
    text = json.dumps(result, indent=1) + "\n"
    pictures, files = [args.output / "demo.png"], [args.output / "demo.json"]
    if args.keep:
        pictures.append(ROOT / "docs" / "demo.png")
        files.append(ROOT / "benchmarks" / "results" / "demo.json")
        readme = ROOT / "README.md"
        readme.write_text(report.put_into_readme(readme.read_text(), result))
    for picture in pictures:
        plot.draw(result, picture)
    for file in files:
        file.write_text(text)
    console.print(report.terminal_table(result))
    for line in report.verdict_lines(result):
        console.print(line, highlight=False)
    console.print(f"plot: {pictures[0]}\nfigures: {files[0]}", highlight=False, soft_wrap=True)
    return 0 if result["verdict"]["passed"] else 1


def parse(arguments: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    parser = argparse.ArgumentParser("python -m examples.demo", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model, a few seconds")
    parser.add_argument("--output", type=Path, default=ROOT / ".demo", help="for plot and figures")
    parser.add_argument("--disk", type=Path, help="zeepo's directory; default: the output's")
    parser.add_argument(
        "--keep", action="store_true", help="write docs/demo.png, benchmarks/results, README too"
    )
    parser.add_argument("--ram", help="zeepo's budget; default: --share of what plain grew by")
    parser.add_argument("--share", type=float, help="of plain's memory; more makes the demo fail")
    for name in SHAPE:
        parser.add_argument(f"--{name}", type=type(FULL[name]), help=f"default {FULL[name]}")
    args = parser.parse_args(arguments)
    settings = dict(SMALL if args.small else FULL)
    given = {name: getattr(args, name) for name in (*SHAPE, "ram", "share")}
    settings |= {name: value for name, value in given.items() if value is not None}
    return args, settings


def main(arguments: list[str]) -> int:
    args, settings = parse(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    budget = (
        f'ram="{settings["ram"]}"' if settings["ram"] else f"{settings['share']:.0%} of its memory"
    )
    display = Display()
    minutes = "ten seconds" if args.small else "two minutes on two cores"
    display.say(HEADER.format(budget=budget, minutes=minutes, **settings))
    host = report.machine()
    if report.is_busy(host):
        display.say(
            f"[yellow]This machine is busy (load {host['load_before']} on {host['cores']} cores): "
            "it will take longer, and the speeds will say little.[/]"
        )
    with tempfile.TemporaryDirectory(dir=args.disk or args.output, prefix="scratch-") as disk:
        plain, zeepo = train_both(settings, Path(disk), display)
    return conclude(report.make_result(plain, zeepo, settings, host), args)


if __name__ == "__main__":
    # So that being told to stop ends the child and removes the scratch files too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
