"""Questions whose answer is a span of their paragraph: words, spans, and a split that shares no paragraph."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Passage:
    """A paragraph and where its words are.

    Example:
        >>> passage = Passage("Cut it, exactly.")
        >>> passage.words
        ('Cut', 'it', ',', 'exactly', '.')
        >>> passage.text_of(1, 3)
        'it, exactly'
    """

    text: str

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return tuple(match.span() for match in WORD.finditer(self.text))

    @cached_property
    def words(self) -> tuple[str, ...]:
        return tuple(self.text[a:b] for a, b in self.spans)

    def text_of(self, start: int, end: int) -> str:
        """The text from word `start` to word `end`, both included."""
        return self.text[self.spans[start][0] : self.spans[end][1]]

    def words_at(self, start: int, end: int) -> tuple[int, int] | None:
        """The first and last word that characters `start` to `end` (excluded) touch, or None where they touch none."""
        touched = [i for i, (a, b) in enumerate(self.spans) if a < end and b > start]
        return (touched[0], touched[-1]) if touched else None


@dataclass(frozen=True)
class Question:
    """A question about a passage; the answer to learn is its words `start` to `end`, both included.

    `answers` are all texts that count as right (SQuAD gives several).
    """

    passage: Passage
    words: tuple[str, ...]
    start: int
    end: int
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Questions:
    """What was read and where from; how many questions were left out, or corrected, for which reason."""

    source: str
    items: Sequence[Question]
    left_out: dict[str, int] = field(default_factory=dict)
    corrected: dict[str, int] = field(default_factory=dict)


def split(questions: Sequence[Question], held_out: float = 0.2) -> tuple[list[Question], list[Question]]:
    """Training and held-out questions; no paragraph is in both, and the same questions always split the same way.

    Example:
        >>> asked = [Question(Passage(f"Paragraph {i % 5}."), ("?",), 1, 1, (str(i % 5),)) for i in range(10)]
        >>> train, test = split(asked)
        >>> len(train), len(test)
        (8, 2)
        >>> {q.passage for q in train} & {q.passage for q in test}
        set()
    """
    passages = list(dict.fromkeys(question.passage for question in questions))
    random.Random(0).shuffle(passages)
    kept_back = set(passages[: math.ceil(len(passages) * held_out)])
    return [q for q in questions if q.passage not in kept_back], [q for q in questions if q.passage in kept_back]
