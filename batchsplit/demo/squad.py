"""SQuAD-format JSON, 1.1 and 2.0, to questions with their answer's place in words."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from batchsplit.demo.text import Passage, Question, Questions
from batchsplit.errors import CutError

UNANSWERABLE = "without an answer"
MISALIGNED = "with no answer found in their paragraph"
MOVED = "with an offset that had to be corrected"


class FormatError(CutError):
    """A file that is not in SQuAD's format."""


def squad_questions(path: str | Path, longest: int = 200) -> Questions:
    """The questions of a SQuAD-format file whose passage has at most `longest` words.

    An answer whose `answer_start` points elsewhere is looked for in its paragraph, nearest first. What is left out, and
    what was corrected, is counted by its reason.

    Raises:
        CutError: the file is no SQuAD-format JSON (names the entry), or holds no question to learn from.
        OSError: it can't be read.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: no JSON ({error}); --squad wants a file in SQuAD's format.") from None
    items: list[Question] = []
    counts: Counter[str] = Counter()
    for context, entry, where in _entries(content, path):
        passage = Passage(context)
        words = Passage(_get(entry, "question", str, where)).words
        texts = [(_get(a, "text", str, w), _get(a, "answer_start", int, w)) for a, w in _answers(entry, where)]
        if entry.get("is_impossible") or not texts:
            counts[UNANSWERABLE] += 1
        elif not words:
            counts["without words"] += 1
        elif len(passage.words) > longest:
            counts[f"about paragraphs of more than {longest} words"] += 1
        elif (found := _locate(passage, texts)) is None:
            counts[MISALIGNED] += 1
        else:
            (start, end), moved = found
            counts[MOVED] += moved
            items.append(Question(passage, words, start, end, tuple(dict.fromkeys(text for text, _ in texts))))
    if not items:
        reasons = "; ".join(f"{count} {reason}" for reason, count in counts.items()) or "it holds none"
        raise FormatError(f"{path}: no question to learn from ({reasons}).")
    corrected = counts.pop(MOVED, 0)
    return Questions(str(path), items, dict(counts), {MOVED: corrected} if corrected else {})


def _entries(content: Any, path: str | Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each question with its paragraph's text, and where in the file it stands."""
    for i, article in enumerate(_get(content, "data", list, f"{path}: the top level")):
        for j, paragraph in enumerate(_get(article, "paragraphs", list, f"{path}: data[{i}]")):
            where = f"{path}: data[{i}].paragraphs[{j}]"
            context = _get(paragraph, "context", str, where)
            for k, entry in enumerate(_get(paragraph, "qas", list, where)):
                yield context, entry, f"{where}.qas[{k}]"


def _answers(entry: dict[str, Any], where: str) -> Iterator[tuple[Any, str]]:
    answers = _get(entry, "answers", list, where) if "answers" in entry or not entry.get("is_impossible") else []
    for i, answer in enumerate(answers):
        yield answer, f"{where}.answers[{i}]"


def _get(node: Any, key: str, kind: type, where: str) -> Any:
    value = node.get(key) if isinstance(node, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {list: "list", str: "text", int: "number"}
        raise FormatError(f"{where} has no {names[kind]} {key!r}; --squad wants a file in SQuAD's format.")
    return value


def _locate(passage: Passage, answers: Iterable[tuple[str, int]]) -> tuple[tuple[int, int], bool] | None:
    """The words of the first answer that is in the passage, and whether its offset was wrong."""
    for text, offset in answers:
        places = [match.start() for match in re.finditer(f"(?={re.escape(text)})", passage.text)]
        if places and text.strip():
            start = min(places, key=lambda place: abs(place - offset))
            words = passage.words_at(start, start + len(text))
            if words is not None:
                return words, start != offset
    return None
