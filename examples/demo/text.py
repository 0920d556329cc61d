"""Real text that is on every machine, the Python standard library's own sources, as tokens.

A token is a word of the text (with the space before it, if any), a number, a run of spaces or of
signs. The most frequent ones make the vocabulary; any other is spelt with tokens of one byte, of
which there are 256. So every text has exactly one sequence of tokens, and `decode` gives it back.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NUM_BYTE_TOKENS = 256
WORD = re.compile(rb" ?[A-Za-z_]+| ?[0-9]+|\s+|[^\sA-Za-z_0-9]+")
NOT_ON_EVERY_MACHINE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def standard_library() -> bytes:
    """The sources, in the order of their paths."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path
        for path in folder.rglob("*.py")
        if not NOT_ON_EVERY_MACHINE.intersection(path.relative_to(folder).parts)
    )
    return b"".join(path.read_bytes() for path in paths)


@dataclass(frozen=True)
class Tokenizer:
    """Words to tokens and back."""

    words: tuple[bytes, ...]
    """The token of `words[i]` is i + 256."""

    @classmethod
    def of(cls, text: bytes, vocabulary: int) -> Tokenizer:
        """The tokenizer whose words are the most frequent ones of this text."""
        counts = Counter(word for word in WORD.findall(text) if len(word) > 1)
        return cls(tuple(word for word, _ in counts.most_common(vocabulary - NUM_BYTE_TOKENS)))

    def encode(self, text: bytes) -> np.ndarray:
        token_of = {word: NUM_BYTE_TOKENS + i for i, word in enumerate(self.words)}
        tokens: list[int] = []
        for word in WORD.findall(text):
            token = token_of.get(word)
            if token is None:
                tokens.extend(word)
            else:
                tokens.append(token)
        return np.array(tokens, dtype=np.int32)

    def decode(self, tokens: np.ndarray) -> bytes:
        def spell(token: int) -> bytes:
            if token < NUM_BYTE_TOKENS:
                return bytes([token])
            return self.words[token - NUM_BYTE_TOKENS]

        return b"".join(spell(int(token)) for token in tokens)
