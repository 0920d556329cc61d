"""A terminal made of a list of lines: just the sequences that zeepo and rich's colours use."""

from __future__ import annotations

import io
import re

_TOKEN = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|(\r|\n)|([^\x1b\r\n]+)")


class Terminal(io.TextIOBase):
    """Keeps what a person would see on it; two streams may share one (`second`)."""

    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self) -> None:
        self.lines = [""]
        self.row = self.column = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.show(text)
        return len(text)

    def show(self, text: str) -> None:
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            assert match is not None, f"not understood: {text[position:]!r}"
            position = match.end()
            number, command, control, plain = match.groups()
            if command is not None:
                self._command(command, number)
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self.row, self.column = self.row + 1, 0
                if self.row == len(self.lines):
                    self.lines.append("")
            else:
                line = self.lines[self.row].ljust(self.column)
                end = self.column + len(plain)
                self.lines[self.row] = line[: self.column] + plain + line[end:]
                self.column = end

    def _command(self, command: str, number: str) -> None:
        if command == "A":
            self.row = max(0, self.row - int(number or 1))
        elif command == "K":
            self.lines[self.row] = self.lines[self.row][: self.column]
        elif command == "J":
            self.lines[self.row] = self.lines[self.row][: self.column]
            del self.lines[self.row + 1 :]
        else:
            assert command == "m", f"command {command}"

    def second(self) -> Terminal:
        """Another stream to the same terminal, as stdout is beside stderr."""
        return _Second(self)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


class _Second(Terminal):
    def __init__(self, first: Terminal) -> None:
        self._first = first

    def write(self, text: str) -> int:
        self._first.show(text)
        return len(text)
