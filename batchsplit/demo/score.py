"""SQuAD's two measures of an answer, F1 and exact match, as its official evaluation script (version 1.1) has them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces, as in SQuAD's official evaluation script.

    Example:
        >>> normalised("The  Panthers' defense, a wall")
        'panthers defense wall'
    """
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(predicted: str, answers: Iterable[str]) -> float:
    """1.0 if the prediction is one of the answers after normalisation, else 0.0.

    Example:
        >>> exact_match("The Cut!", ["a cut", "a split"]), exact_match("cuts", ["a cut"])
        (1.0, 0.0)
    """
    return float(any(normalised(predicted) == normalised(answer) for answer in answers))


def f1(predicted: str, answers: Iterable[str]) -> float:
    """Harmonic mean of precision and recall over the words, for the answer where it is largest.

    Example:
        >>> round(f1("four interceptions in 2015", ["four interceptions", "five"]), 4)
        0.6667
    """
    return max((_overlap(normalised(predicted).split(), normalised(a).split()) for a in answers), default=0.0)


def _overlap(predicted: list[str], answer: list[str]) -> float:
    same = sum((Counter(predicted) & Counter(answer)).values())
    return 2 * same / (len(predicted) + len(answer)) if same else 0.0
