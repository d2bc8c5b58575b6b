"""A small reader in the manner of BiDAF, and as sensitive to padding as BiDAF was.

Seo, Kembhavi, Farhadi, Hajishirzi: "Bidirectional Attention Flow for Machine Comprehension" (2017). Smaller in every
size, with one modelling layer where the paper has two, a skip connection for its highway layers, and no dropout: what
two arms of the experiment differ in is then their padding alone.

The max-pool of the letter CNN looks at padding as at any other letter, so that a word's features depend on the longest
word of its *batch*. The recurrent layers run over padding too, and their backward direction starts in it. Only the
attentions and the span are masked.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from batchsplit.demo.collate import PADDING, SHORTEST_WIDTH


class LetterCNN(nn.Module):
    """(rows, words, letters) → (rows, words, features): embed, convolve, take the largest over all positions."""

    def __init__(self, letters: int, features: int, embedding: int = 8, width: int = SHORTEST_WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, embedding)
        self.convolve = nn.Conv1d(embedding, features, width)

    def forward(self, letters: Tensor) -> Tensor:
        rows, words, width = letters.shape
        seen = self.convolve(self.embed(letters.reshape(rows * words, width)).transpose(1, 2))
        return seen.amax(2).view(rows, words, -1)


class Attention(nn.Module):
    """Passage and question, each told what the other says: (rows, passage words, 4 × features).

    The similarity of passage word p and question word q is w · [p; q; p × q], as in the paper.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.passage = nn.Parameter(torch.zeros(features))
        self.question = nn.Parameter(torch.zeros(features))
        self.both = nn.Parameter(torch.full((features,), features**-0.5))  # starts as a scaled dot product

    def forward(self, passage: Tensor, question: Tensor, seen: Tensor, asked: Tensor) -> Tensor:
        alike = (passage * self.both) @ question.transpose(1, 2)
        alike = alike + (passage @ self.passage)[:, :, None] + (question @ self.question)[:, None, :]
        alike = alike.masked_fill(~asked[:, None, :], -torch.inf)
        answered = alike.softmax(2) @ question
        relevant = alike.amax(2).masked_fill(~seen, -torch.inf).softmax(1)
        gist = (relevant[:, None, :] @ passage).expand_as(passage)
        return torch.cat([passage, answered, passage * answered, passage * gist], 2)


class Reader(nn.Module):
    """Logits of where an answer starts and ends, each (rows, passage words), minus infinity on padding."""

    def __init__(self, words: int, letters: int, size: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, size)
        self.spell = LetterCNN(letters, size)
        self.encode = nn.LSTM(2 * size, size, batch_first=True, bidirectional=True)
        self.attend = Attention(2 * size)
        self.model = nn.LSTM(8 * size, size, batch_first=True, bidirectional=True)
        self.span = nn.Linear(10 * size, 2, bias=False)  # a bias would cancel in the softmax

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        seen, asked = batch["passage"] != PADDING, batch["question"] != PADDING
        passage = self.read(batch["passage"], batch["passage_letters"])
        question = self.read(batch["question"], batch["question_letters"])
        told = self.attend(passage, question, seen, asked)
        logits = self.span(torch.cat([told, self.model(told)[0]], 2)).masked_fill(~seen[:, :, None], -torch.inf)
        return logits[:, :, 0], logits[:, :, 1]

    def read(self, words: Tensor, letters: Tensor) -> Tensor:
        """Each word by itself and in its context: (rows, words, 2 × size)."""
        alone = torch.cat([self.embed(words), self.spell(letters)], 2)
        return alone + self.encode(alone)[0]

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean over rows of the two cross entropies."""
        start, end = self(batch)
        return cross_entropy(start, batch["start"]) + cross_entropy(end, batch["end"])


def best_spans(start: Tensor, end: Tensor, longest: int = 20) -> Tensor:
    """(rows, 2): the first and last word of the likeliest span of at most `longest` words.

    Example:
        >>> best_spans(torch.tensor([[0.0, 1.0, 9.0]]), torch.tensor([[9.0, 5.0, 1.0]])).tolist()
        [[2, 2]]
    """
    scores = start[:, :, None] + end[:, None, :]
    allowed = torch.ones_like(scores, dtype=torch.bool).triu().tril(longest - 1)
    best = scores.masked_fill(~allowed, -torch.inf).flatten(1).argmax(1)
    return torch.stack([best // scores.shape[2], best % scores.shape[2]], 1)
