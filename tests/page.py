"""Run a Markdown page: its blocks in their order, in one namespace and one folder.

    python tests/page.py [--slow] docs/start.md FOLDER

- ``python`` is executed. Trailing comment lines that begin with the name of an error
  (``# BudgetError: ram=... is too little``) say that the block ends with this error, and its text.
- ``python`` and ``toml`` whose first line is a file's name (``# train.py``) are written to the
  folder; a script has to be run by a ``console`` block further down.
- ``toml`` is read by zeepo's own reader of options.
- ``console``: each line after ``$`` is a command and has to succeed; the lines below it are its
  output on stdout, if any are shown.

A block marked ``slow`` after its language is left out without ``--slow``. ``...`` in a text stands
for anything. A session that a block leaves open is closed after it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LANGUAGES = ("python", "toml", "console")

_FENCE = re.compile(r"(```+)(.*)")
_FILE_NAME = re.compile(r"# ([\w-]+\.(?:py|toml))\n")
_ERROR = re.compile(r"^# (\w+Error): (.*\n(?:# .*\n)*)\Z", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block, and the line of the page on which its text begins."""

    page: Path
    line: int
    language: str
    is_slow: bool
    text: str

    @property
    def file_name(self) -> str | None:
        found = _FILE_NAME.match(self.text)
        return found[1] if found else None

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    found: list[Block] = []
    fence, words, start, lines = "", [""], 0, []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        match = _FENCE.match(line)
        if not fence and match:
            fence, words, start, lines = match[1], match[2].split() or [""], number + 1, []
        elif fence and line.strip() == fence:
            text = "".join(text + "\n" for text in lines)
            found.append(Block(page, start, words[0], "slow" in words[1:], text))
            fence = ""
        elif fence:
            lines.append(line)
    if fence:
        raise ValueError(f"{page.name}:{start}: the block does not end")
    return found


def is_like(shown: str, text: str) -> bool:
    """Whether `text` is what is shown, whatever its line breaks; ``...`` stands for anything."""
    parts = [r"\s+".join(map(re.escape, part.split())) for part in shown.split("...")]
    pattern = r".*".join(rf"\s*{part}\s*" for part in parts)
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def commands_of(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block with the output that is shown for it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def run_page(page: Path, *, slow: bool) -> None:
    """Run the blocks of a page in the current folder; AssertionError with the place."""
    import zeepo

    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks_of(page):
        if block.file_name is not None:
            Path(block.file_name).write_text(block.text)
        if block.is_slow and not slow:
            continue
        if block.language == "toml":
            _read_options(block)
        elif block.language == "console":
            _run_commands(block)
        elif block.file_name is None:
            try:
                _run_python(block, namespace)
            finally:
                zeepo.close()


def _run_python(block: Block, namespace: dict[str, Any]) -> None:
    shown = _ERROR.search(block.text)
    code = compile("\n" * (block.line - 1) + block.text, block.page.name, "exec")
    if shown is None:
        exec(code, namespace)
        return
    name, text = shown[1], shown[2].replace("\n# ", "\n")
    try:
        exec(code, namespace)
    except Exception as error:
        raised, said = type(error).__name__, str(error)
    else:
        raised, said = "nothing", ""
    assert raised == name, f"{block.place}: shown is {name}, raised is {raised}: {said}"
    assert is_like(text, said), f"{block.place}: shown is\n{text}\nbut it says\n{said}"


def _read_options(block: Block) -> None:
    from zeepo.config import resolve_options

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(block.text)
        file.flush()
        resolve_options({}, file.name, environ={})


def _run_commands(block: Block) -> None:
    assert block.text.startswith("$ "), f"{block.place}: a console block begins with a command"
    for command, shown in commands_of(block.text):
        ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
        told = f"{block.place}: $ {command}\n{ran.stdout}\n{ran.stderr}"
        assert ran.returncode == 0, f"{told}\nstatus {ran.returncode}"
        assert not shown.strip() or is_like(shown, ran.stdout), f"{told}\nshown is\n{shown}"


def main() -> None:
    *flags, page, folder = sys.argv[1:]
    path = Path(page).absolute()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.chdir(folder)
    run_page(path, slow="--slow" in flags)


if __name__ == "__main__":
    main()
