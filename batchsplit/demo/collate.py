"""Questions to padded tensors: the mathematical batch of the experiment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from batchsplit.demo.text import Question

PADDING, UNKNOWN = 0, 1
SHORTEST_WIDTH = 5  # letters: the reader's convolution sees as many at once
LONGEST_WORD = 20  # characters; the rest of a longer word (an address, say) is left unread


class Vocabulary:
    """Numbers for words and characters; 0 is padding, 1 what training did not show often enough.

    Example:
        >>> from batchsplit.demo.text import Passage
        >>> question = Question(Passage("to be or not to be"), ("to", "be"), 0, 1, ("to be",))
        >>> Vocabulary([question], at_least=2).words
        {'to': 2, 'be': 3}
    """

    def __init__(self, questions: Iterable[Question], at_least: int = 3) -> None:
        passages = list(dict.fromkeys(q.passage for q in questions))
        texts = [*(p.words for p in passages), *(q.words for q in questions)]
        words = Counter(word.lower() for text in texts for word in text)
        letters = Counter(letter for text in texts for word in text for letter in word)
        self.words = {word: i for i, word in enumerate((w for w in words if words[w] >= at_least), start=2)}
        self.letters = {letter: i for i, letter in enumerate((c for c in letters if letters[c] >= at_least), start=2)}

    def word_ids(self, words: Sequence[str]) -> list[int]:
        return [self.words.get(word.lower(), UNKNOWN) for word in words]

    def letter_ids(self, words: Sequence[str]) -> list[list[int]]:
        return [[self.letters.get(letter, UNKNOWN) for letter in word[:LONGEST_WORD]] for word in words]


def padded(rows: Sequence[Sequence[int]], at_least: int = 1) -> Tensor:
    """(rows, longest row), filled up with padding."""
    width = max(at_least, *map(len, rows))
    return torch.from_numpy(np.array([[*row, *[PADDING] * (width - len(row))] for row in rows], dtype=np.int64))


def padded_letters(rows: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """(rows, most words, most letters), filled up with padding in both directions."""
    words = max(map(len, rows))
    flat = padded([word for row in rows for word in [*row, *[()] * (words - len(row))]], SHORTEST_WIDTH)
    return flat.view(len(rows), words, -1)


def collate(questions: Sequence[Question], vocabulary: Vocabulary) -> dict[str, Tensor]:
    """One batch, padded to its own longest passage, question and word.

    `passage` and `question` are (rows, words), `passage_letters` and `question_letters` (rows, words, letters),
    `start` and `end` (rows,): the first and last word of the answer.
    """
    return {
        "passage": padded([vocabulary.word_ids(q.passage.words) for q in questions]),
        "passage_letters": padded_letters([vocabulary.letter_ids(q.passage.words) for q in questions]),
        "question": padded([vocabulary.word_ids(q.words) for q in questions]),
        "question_letters": padded_letters([vocabulary.letter_ids(q.words) for q in questions]),
        "start": torch.tensor([q.start for q in questions]),
        "end": torch.tensor([q.end for q in questions]),
    }
