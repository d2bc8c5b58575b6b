"""The experiment: the same questions in the same order, read by three readers that start alike and differ in padding.

*whole* sees one padded batch a step, *accumulated* adds up the gradients of smaller batches that are each padded by
themselves, *cut* those of the whole batch's sub-batches. AllenNLP's trainers did the second when they measured what
gradient accumulation costs BiDAF.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import torch
from more_itertools import chunked
from torch import Tensor
from tqdm.auto import tqdm

from batchsplit.cutter import BatchCutter
from batchsplit.demo.collate import Vocabulary, collate
from batchsplit.demo.reader import Reader, best_spans
from batchsplit.demo.saved import SavedBytes
from batchsplit.demo.score import exact_match, f1
from batchsplit.demo.text import Question, Questions, split
from batchsplit.errors import CutError
from batchsplit.step import run_step

ARMS = ("whole", "accumulated", "cut")
EVALUATED_AT_ONCE = 40  # rows: padding matters in evaluation too, so that it is the same for every arm


@dataclass(frozen=True)
class Settings:
    """What is trained, and for how long; `batch` and `rows` count rows, `held_out` questions.

    One thread: in matrices as small as these several would wait for each other more than they work.
    """

    seeds: int = 3
    steps: int = 36
    batch: int = 40
    rows: int = 20
    held_out: int = 400
    size: int = 24
    learning_rate: float = 1e-2
    epsilon: float = 1e-4  # Adam's: at its usual 1e-8 a gradient of nearly nothing, rounding and all, is a full step
    clip_norm: float = 1.0
    dtype: str = "float64"
    threads: int = 1


@dataclass
class ArmResult:
    """What one arm came to: a number a seed, or a list of numbers, one a step, a seed."""

    f1: list[float] = field(default_factory=list)
    exact_match: list[float] = field(default_factory=list)
    differences: list[list[float]] = field(default_factory=list)
    saved_bytes: int = 0  # the most of all first steps
    seconds: float = 0.0  # of all training steps, evaluation left out

    @property
    def difference_from_whole(self) -> float:
        """The largest difference of a parameter from the *whole* arm's after the first step, in any seed."""
        return max(steps[0] for steps in self.differences)

    @property
    def difference_at_end(self) -> float:
        """The same after the last step."""
        return max(steps[-1] for steps in self.differences)


@dataclass
class Result:
    """The three arms, and what they were measured on."""

    settings: Settings
    questions: Questions
    trained_on: int
    tested_on: int
    arms: dict[str, ArmResult]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        arms = {
            name: {
                "f1": arm.f1,
                "exact_match": arm.exact_match,
                "difference_from_whole": arm.difference_from_whole,
                "difference_at_end": arm.difference_at_end,
                "saved_bytes": arm.saved_bytes,
                "seconds": arm.seconds,
                "difference_by_step": arm.differences,
            }
            for name, arm in self.arms.items()
        }
        data = {
            "source": self.questions.source,
            "questions": len(self.questions.items),
            "trained_on": self.trained_on,
            "tested_on": self.tested_on,
            "left_out": self.questions.left_out,
            "corrected": self.questions.corrected,
        }
        return {"arms": arms, "settings": asdict(self.settings), "data": data}


class Training:
    """One arm with one seed: a reader, its optimizer, and its way of taking a step."""

    def __init__(self, arm: str, reader: Reader, vocabulary: Vocabulary, settings: Settings) -> None:
        self.arm, self.reader, self.vocabulary, self.settings = arm, reader, vocabulary, settings
        self.cutter = BatchCutter(rows=settings.rows)
        self.optimizer = torch.optim.Adam(reader.parameters(), lr=settings.learning_rate, eps=settings.epsilon)
        self.seconds = 0.0
        self.saved_bytes = 0

    def step(self, questions: Sequence[Question]) -> float:
        """Train on the questions of one mathematical batch and return the loss; the first step counts saved bytes."""
        started = time.perf_counter()
        padded_together = chunked(questions, self.settings.rows) if self.arm == "accumulated" else [questions]
        batches = [collate(part, self.vocabulary) for part in padded_together]
        with nullcontext() if self.saved_bytes else self._counting(batches) as saved:
            loss = self._backward(batches)
        torch.nn.utils.clip_grad_norm_(self.reader.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.perf_counter() - started
        self.saved_bytes = saved.peak if saved else self.saved_bytes
        return loss

    def _backward(self, batches: list[dict[str, Tensor]]) -> float:
        if self.arm == "cut":
            [batch] = batches
            return run_step(self.cutter.cut(batch), self.reader.loss, model=self.reader).item()
        total = 0.0
        for batch in batches:
            loss = self.reader.loss(batch) / len(batches)
            loss.backward()
            total += loss.item()
        return total

    def _counting(self, batches: list[dict[str, Tensor]]) -> SavedBytes:
        return SavedBytes(ignore=[*self.reader.parameters(), *(leaf for batch in batches for leaf in batch.values())])


def run(questions: Questions, settings: Settings = Settings(), *, progress: bool = True) -> Result:
    """Train and evaluate every arm with every seed; progress bars go to stderr.

    Raises:
        CutError: there are too few questions for one batch, or `rows` does not divide `batch`.
    """
    if settings.batch % settings.rows:
        raise CutError(
            f"rows={settings.rows} does not divide batch={settings.batch}: accumulated batches of different sizes "
            f"would differ in more than padding; write a number of rows that divides {settings.batch}."
        )
    train, test = split(questions.items)
    test = test[:: max(1, len(test) // settings.held_out)][: settings.held_out]
    if len(train) < settings.batch or not test:
        raise CutError(
            f"{questions.source}: of {len(questions.items)} questions {len(train)} are for training and {len(test)} "
            f"held out, but one batch alone takes {settings.batch}."
        )
    vocabulary = Vocabulary(train)
    result = Result(settings, questions, len(train), len(test), {arm: ArmResult() for arm in ARMS})
    total = settings.seeds * settings.steps
    with _threads(settings.threads), tqdm(total=total, unit="step", dynamic_ncols=True, disable=not progress) as bar:
        for seed in range(settings.seeds):
            bar.set_description(f"training, seed {seed + 1} of {settings.seeds}")
            for arm, training in _train(seed, train, vocabulary, settings, result, bar).items():
                scores = evaluate(training.reader, test, vocabulary, f"evaluating {arm}", progress)
                result.arms[arm].f1.append(scores[0])
                result.arms[arm].exact_match.append(scores[1])
    return result


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(
    seed: int, train: list[Question], vocabulary: Vocabulary, settings: Settings, result: Result, bar: tqdm
) -> dict[str, Training]:
    """All arms in step, so that their parameters can be compared after each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = Reader(len(vocabulary.words) + 2, len(vocabulary.letters) + 2, settings.size)
    first.to(getattr(torch, settings.dtype))
    trainings = {arm: Training(arm, copy.deepcopy(first), vocabulary, settings) for arm in ARMS}
    for arm in result.arms.values():
        arm.differences.append([])
    for questions in _batches(seed, train, settings):
        losses = {arm: training.step(questions) for arm, training in trainings.items()}
        for arm, training in trainings.items():
            result.arms[arm].differences[-1].append(difference(training.reader, trainings["whole"].reader))
        bar.set_postfix({arm: f"{loss:.3f}" for arm, loss in losses.items()}, refresh=False)
        bar.update()
    for arm, training in trainings.items():
        result.arms[arm].seconds += training.seconds
        result.arms[arm].saved_bytes = max(result.arms[arm].saved_bytes, training.saved_bytes)
    return trainings


def _batches(seed: int, train: list[Question], settings: Settings) -> Iterator[list[Question]]:
    """The questions of each step: epochs in an order that the seed decides, an incomplete last batch left out."""
    order = random.Random(seed)
    steps = 0
    while True:
        shuffled = order.sample(train, len(train))
        for start in range(0, len(shuffled) - settings.batch + 1, settings.batch):
            if steps == settings.steps:
                return
            steps += 1
            yield shuffled[start : start + settings.batch]


@torch.no_grad()
def difference(reader: Reader, other: Reader) -> float:
    """The largest absolute difference of a parameter."""
    pairs = zip(reader.parameters(), other.parameters(), strict=True)
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


@torch.no_grad()
def evaluate(
    reader: Reader, questions: list[Question], vocabulary: Vocabulary, title: str = "", progress: bool = False
) -> tuple[float, float]:
    """Mean F1 and exact match of the reader's likeliest spans."""
    scores: list[tuple[float, float]] = []
    parts = list(chunked(questions, EVALUATED_AT_ONCE))
    for part in tqdm(parts, desc=title, unit="batch", leave=False, disable=not progress):
        spans = best_spans(*reader(collate(part, vocabulary))).tolist()
        for question, (start, end) in zip(part, spans, strict=True):
            predicted = question.passage.text_of(start, end)
            scores.append((f1(predicted, question.answers), exact_match(predicted, question.answers)))
    return fmean(a for a, _ in scores), fmean(b for _, b in scores)
