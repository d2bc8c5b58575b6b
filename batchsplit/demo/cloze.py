"""Cloze questions from the text that every Python carries: a sentence with a rare word blanked, to be found again."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from batchsplit.demo.text import Passage, Question, Questions
from batchsplit.errors import CutError

BLANK = "____"
SOURCES = (
    "asyncio/streams bdb calendar cmd codecs collections/__init__ configparser contextlib datetime difflib inspect "
    "email/message http/cookiejar locale os pdb random shutil socket statistics subprocess tempfile textwrap threading "
    "turtle typing urllib/request warnings"
)
WORDS_IN_PARAGRAPH = range(12, 46)
WORDS_IN_SENTENCE = range(6, 23)
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(*])")


def topics() -> Iterator[str]:
    """The language reference as `help()` shows it; nothing where a distribution leaves it out."""
    try:
        from pydoc_data import topics
    except ImportError:
        return
    yield from topics.topics.values()


def docstrings(sources: str = SOURCES) -> Iterator[str]:
    """Every docstring in these files of the standard library, which are read, not run; missing ones are passed over."""
    for name in sources.split():
        try:
            source = Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text("utf-8")
        except OSError:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield ast.get_docstring(node) or ""


def paragraphs(texts: Iterable[str]) -> list[str]:
    """Distinct paragraphs of prose, in order, each on one line: no headings, code, grammar or lists of signatures."""
    found: dict[str, None] = {}
    for text in texts:
        for block in re.split(r"\n\s*\n", text):
            line = " ".join(block.split())
            letters = sum(c.isalpha() or c == " " for c in line)
            prose = line[:1].isalpha() and line[-1:] in ".:!?" and ">>>" not in line and "::=" not in line
            if prose and letters > 0.9 * len(line) and len(Passage(line).words) in WORDS_IN_PARAGRAPH:
                found[line] = None
    return list(found)


def cloze(lines: Iterable[str]) -> Iterator[Question]:
    """One question a sentence: the rarest of the words that its paragraph has only once is blanked.

    Example:
        >>> line = "The zebra is the animal that has most stripes. It is an animal of the open savanna in the south."
        >>> for question in cloze([line]):
        ...     print(question.answers, " ".join(question.words))
        ('stripes',) The zebra is the animal that has most ____ .
        ('savanna',) It is an animal of the open ____ in the south .
    """
    passages = [Passage(line) for line in lines]
    counts = Counter(word.lower() for passage in passages for word in passage.words)
    asked: set[tuple[str, ...]] = set()
    for passage in passages:
        here = Counter(word.lower() for word in passage.words)
        breaks = [match.end() for match in SENTENCE.finditer(passage.text)]
        for a, b in zip([0, *breaks], [*breaks, len(passage.text)], strict=True):
            touched = passage.words_at(a, b)
            if touched is None:
                continue
            first, last = touched
            sentence = passage.words[first : last + 1]
            places = [
                i for i in range(first, last + 1)
                if passage.words[i].isalpha() and len(passage.words[i]) > 3 and here[passage.words[i].lower()] == 1
            ]  # fmt: skip
            if len(sentence) not in WORDS_IN_SENTENCE or not places or sentence in asked:
                continue
            asked.add(sentence)  # the same sentence in another paragraph would give the held-out answer away
            place = min(places, key=lambda i: (counts[passage.words[i].lower()], -len(passage.words[i]), i))
            blanked = (*passage.words[first:place], BLANK, *passage.words[place + 1 : last + 1])
            yield Question(passage, blanked, place, place, (passage.words[place],))


def python_questions() -> Questions:
    """Cloze questions from `pydoc_data.topics` and the standard library's docstrings.

    Raises:
        CutError: if this Python carries neither.
    """
    items = list(cloze(paragraphs([*topics(), *docstrings()])))
    if not items:
        raise CutError("this Python carries no documentation to ask about; name a SQuAD-format file: --squad FILE.")
    return Questions("cloze questions from Python's own documentation", items)
