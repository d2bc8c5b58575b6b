"""The demo's parts: questions, padding, reader, the three arms, measures, and what is said of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from batchsplit import BatchCutter, CutError, run_step
from batchsplit.demo import experiment
from batchsplit.demo.cloze import BLANK, cloze, docstrings, paragraphs, python_questions, topics
from batchsplit.demo.collate import PADDING, UNKNOWN, Vocabulary, collate
from batchsplit.demo.experiment import ARMS, Result, Settings, evaluate, run
from batchsplit.demo.plot import check_plot, plot
from batchsplit.demo.reader import Attention, Reader, best_spans
from batchsplit.demo.saved import SavedBytes
from batchsplit.demo.score import exact_match, f1, normalised
from batchsplit.demo.squad import squad_questions
from batchsplit.demo.table import sentence, summary, table
from batchsplit.demo.text import Passage, Question, Questions, split

TINY = Settings(seeds=2, steps=2, batch=8, rows=4, held_out=12, size=4)


@pytest.fixture(scope="module")
def questions() -> Questions:
    return python_questions()


@pytest.fixture(scope="module")
def result(questions: Questions) -> Result:
    return run(questions, TINY, progress=False)


# --- questions ---------------------------------------------------------------------------------------------------


def test_spans_cover_the_blanked_word_and_the_passage_keeps_it(questions: Questions) -> None:
    assert len(questions.items) > 1000
    for question in questions.items:
        words = list(question.passage.words)
        blanked = question.words.index(BLANK)
        assert question.words.count(BLANK) == 1
        assert question.answers == (question.passage.text_of(question.start, question.end),)
        first = question.start - blanked  # where the question's sentence starts in the passage
        sentence = [*question.words[:blanked], words[question.start], *question.words[blanked + 1 :]]
        assert words[first : first + len(sentence)] == sentence
        assert [word.lower() for word in words].count(words[question.start].lower()) == 1


def test_questions_are_the_same_every_time(questions: Questions) -> None:
    lines = paragraphs(topics())
    assert list(cloze(lines)) == list(cloze(lines))
    assert {q.passage for q in questions.items} >= {q.passage for q in cloze(lines[:50])}


def test_both_sources_are_asked_about(questions: Questions) -> None:
    asked = {question.passage.text for question in questions.items}
    assert asked & set(paragraphs(topics()))
    assert asked & set(paragraphs(docstrings("threading")))
    assert list(docstrings("no_such_module nor/this_one")) == []


def test_the_rarest_word_is_blanked() -> None:
    common = "They said that people like a long walk along the river."
    lines = [f"{common} Number {i} of these is about nothing." for i in range(3)]
    [question] = cloze([*lines, "We said that people like a quick glance along the river."][3:])
    assert question.words[question.start] == BLANK
    rare = next(q for q in cloze([*lines, "They said that people like an aardvark and a walk."]) if "an" in q.words)
    assert rare.answers == ("aardvark",)


def test_no_sentence_is_asked_about_twice(questions: Questions) -> None:
    whole_sentences = [
        (*q.words[: q.words.index(BLANK)], *q.answers, *q.words[q.words.index(BLANK) + 1 :]) for q in questions.items
    ]
    assert len(set(whole_sentences)) == len(whole_sentences)


def test_split_shares_no_paragraph_and_loses_no_question(questions: Questions) -> None:
    train, test = split(questions.items)
    assert not {q.passage for q in train} & {q.passage for q in test}
    assert len(train) + len(test) == len(questions.items)
    assert 0.15 < len(test) / len(questions.items) < 0.25


# --- SQuAD's format -----------------------------------------------------------------------------------------------

CONTEXT = "Ada wrote notes. Ada's engine was never built, but her notes on 1,024 cards were read."


def squad_file(folder: Path, *entries: dict[str, Any]) -> Path:
    path = folder / "squad.json"
    content = {
        "version": "v2.0",
        "data": [{"title": "Ada", "paragraphs": [{"context": CONTEXT, "qas": list(entries)}]}],
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def entry(*answers: tuple[str, int], **more: Any) -> dict[str, Any]:
    found = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": "1", "question": "What did she write?", "answers": found, **more}


def test_squad_offsets_become_words_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    path = squad_file(
        tmp_path,
        entry(("notes", 10), ("her notes", 51)),
        entry(("her notes", 0)),  # an offset that points elsewhere
        entry(("notes", 50)),  # the second of the two is nearer
        entry(("not there", 3), ("engine", 23)),
        entry(("not there", 3)),
        entry(("   ", 3)),
        entry(is_impossible=True, plausible_answers=[]),
        entry(),
    )
    questions = squad_questions(path)
    assert [q.passage.text_of(q.start, q.end) for q in questions.items] == ["notes", "her notes", "notes", "engine"]
    assert [q.start for q in questions.items] == [2, 13, 14, 7]
    assert questions.items[0].answers == ("notes", "her notes")
    assert questions.items[0].words == ("What", "did", "she", "write", "?")
    assert questions.left_out == {"with no answer found in their paragraph": 2, "without an answer": 2}
    assert questions.corrected == {"with an offset that had to be corrected": 2}


def test_squad_answer_inside_a_word_takes_the_word(tmp_path: Path) -> None:
    [question] = squad_questions(squad_file(tmp_path, entry(("024", CONTEXT.index("024")), ("24", 66)))).items
    assert question.passage.text_of(question.start, question.end) == "024"
    [question] = squad_questions(squad_file(tmp_path, entry(("24", CONTEXT.index("024") + 1)))).items
    assert question.passage.text_of(question.start, question.end) == "024"


def test_squad_paragraphs_that_are_too_long_are_counted(tmp_path: Path) -> None:
    path = squad_file(tmp_path, entry(("notes", 10)))
    with pytest.raises(CutError, match=r"no question to learn from \(1 about paragraphs of more than 5 words\)"):
        squad_questions(path, longest=5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no JSON"),
        ("[]", "the top level has no list 'data'"),
        ('{"data": {}}', "the top level has no list 'data'"),
        ('{"data": [1]}', r"data\[0\] has no list 'paragraphs'"),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', r"data\[0\].paragraphs\[0\] has no text 'context'"),
        (
            '{"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "b", "answers": [{"text": "a"}]}]}]}]}',
            r"data\[0\].paragraphs\[0\].qas\[0\].answers\[0\] has no number 'answer_start'",
        ),
        (
            '{"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "b"}]}]}]}',
            r"data\[0\].paragraphs\[0\].qas\[0\] has no list 'answers'",
        ),
        ('{"data": []}', r"no question to learn from \(it holds none\)"),
    ],
)
def test_malformed_squad_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(CutError, match=message) as caught:
        squad_questions(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


# --- batches and reader -------------------------------------------------------------------------------------------


def asked(*texts: str) -> list[Question]:
    return [Question(Passage(text), ("which", "____", "?"), 1, 2, (Passage(text).text_of(1, 2),)) for text in texts]


def test_a_batch_is_padded_to_its_own_longest_passage_and_word() -> None:
    rows = asked("one two three", "a much longer passage with extraordinary words")
    vocabulary = Vocabulary(rows, at_least=1)
    batch, alone = collate(rows, vocabulary), collate(rows[:1], vocabulary)
    assert batch["passage"].shape == (2, 7)
    assert batch["passage_letters"].shape == (2, 7, len("extraordinary"))
    assert alone["passage"].shape == (1, 3)
    assert alone["passage_letters"].shape == (1, 3, 5)
    assert torch.equal(batch["passage"][0, :3], alone["passage"][0])
    assert torch.equal(batch["passage_letters"][0, :3, :5], alone["passage_letters"][0])
    assert (batch["passage"][0, 3:] == PADDING).all() and (batch["passage_letters"][0, :, 5:] == PADDING).all()
    assert batch["start"].tolist() == [1, 1] and batch["end"].tolist() == [2, 2]
    assert Vocabulary(rows, at_least=5).word_ids(["extraordinary"]) == [UNKNOWN]


@pytest.fixture
def batch_and_reader(questions: Questions) -> tuple[list[Question], Vocabulary, Reader]:
    vocabulary = Vocabulary(questions.items)
    generator = torch.Generator().manual_seed(torch.initial_seed())
    chosen = [questions.items[i] for i in torch.randperm(len(questions.items), generator=generator)[:10].tolist()]
    reader = Reader(len(vocabulary.words) + 2, len(vocabulary.letters) + 2, size=6).double()
    return chosen, vocabulary, reader


def widened(batch: dict[str, Tensor], words: int, letters: int) -> dict[str, Tensor]:
    """The same rows with more padding."""
    more = {key: torch.nn.functional.pad(batch[key], (0, words)) for key in ("passage", "question")}
    for key in ("passage_letters", "question_letters"):
        more[key] = torch.nn.functional.pad(batch[key], (0, letters, 0, words))
    return {**batch, **more}


@pytest.mark.parametrize(("words", "letters"), [(3, 0), (0, 3)], ids=["words", "letters"])
def test_the_reader_sees_padding(
    batch_and_reader: tuple[list[Question], Vocabulary, Reader], words: int, letters: int
) -> None:
    chosen, vocabulary, reader = batch_and_reader
    batch = collate(chosen, vocabulary)
    width = batch["passage"].shape[1]
    start, end = reader(batch)
    wider_start, wider_end = reader(widened(batch, words, letters))
    real = batch["passage"] != PADDING
    assert (start[real] - wider_start[:, :width][real]).abs().max() > 1e-6
    assert (end[real] - wider_end[:, :width][real]).abs().max() > 1e-6
    assert (wider_start[:, width:] == -math.inf).all()


@torch.no_grad()
def test_attention_is_the_papers_and_does_not_see_padding(float64: None) -> None:
    attend, passage, question = Attention(6), torch.randn(2, 5, 6), torch.randn(2, 4, 6)
    torch.nn.init.normal_(attend.passage)
    torch.nn.init.normal_(attend.question)
    seen, asked = torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool)
    wide_passage = torch.cat([passage, torch.randn(2, 2, 6)], 1)
    wide_question = torch.cat([question, torch.randn(2, 3, 6)], 1)
    wide_seen = torch.nn.functional.pad(seen, (0, 2))
    wide_asked = torch.nn.functional.pad(asked, (0, 3))
    told = attend(passage, question, seen, asked)
    torch.testing.assert_close(attend(wide_passage, wide_question, wide_seen, wide_asked)[:, :5], told)
    similarity = torch.tensor(
        [
            [[attend.passage @ p + attend.question @ q + attend.both @ (p * q) for q in qs] for p in ps]
            for ps, qs in zip(passage, question)
        ]
    )
    answered = similarity.softmax(2) @ question
    gist = (similarity.max(2).values.softmax(1)[:, None] @ passage).expand(2, 5, 6)
    torch.testing.assert_close(told, torch.cat([passage, answered, passage * answered, passage * gist], 2))


def gradients(reader: Reader) -> Tensor:
    flat = torch.cat([p.grad.flatten() for p in reader.parameters() if p.grad is not None])
    reader.zero_grad()
    return flat


@pytest.mark.parametrize("rows", [1, 3, 5, 10])
def test_cut_gradients_are_the_whole_batch_s_and_accumulated_ones_are_not(
    batch_and_reader: tuple[list[Question], Vocabulary, Reader], rows: int
) -> None:
    chosen, vocabulary, reader = batch_and_reader
    batch = collate(chosen, vocabulary)
    reader.loss(batch).backward()
    whole = gradients(reader)
    loss = run_step(BatchCutter(rows=rows).cut(batch), reader.loss, model=reader)
    assert (gradients(reader) - whole).norm() <= 1e-12 * whole.norm()
    assert abs(loss - reader.loss(batch)) <= 1e-12 * loss
    for half in (chosen[:5], chosen[5:]):
        (reader.loss(collate(half, vocabulary)) / 2).backward()
    assert (gradients(reader) - whole).norm() > 1e-6 * whole.norm()


def test_spans_are_in_order_and_short_enough() -> None:
    start, end = torch.randn(5, 12), torch.randn(5, 12)
    for longest in (1, 3, 12):
        for (a, b), s, e in zip(best_spans(start, end, longest).tolist(), start, end):
            allowed = [(i, j) for i in range(12) for j in range(i, min(i + longest, 12))]
            assert (a, b) == max(allowed, key=lambda span: float(s[span[0]] + e[span[1]]))


# --- measures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predicted", "answers", "overlap", "exact"),
    [
        ("the Denver Broncos", ["Denver Broncos"], 1.0, 1.0),
        ("Denver  Broncos!", ["Carolina", "denver broncos"], 1.0, 1.0),
        ("Broncos", ["Denver Broncos"], 2 * 1 * 0.5 / 1.5, 0.0),
        ("to be or not to be", ["be be be"], 2 * 2 / (6 + 3), 0.0),  # a word counts as often as both have it
        ("Panthers", ["Broncos"], 0.0, 0.0),
        ("a theatre", ["theatre"], 1.0, 1.0),  # an article is a word of its own
        ("half", ["one half of it", "half of"], 2 * 1 * 0.5 / 1.5, 0.0),  # the best of the answers counts
    ],
)
def test_measures_by_hand(predicted: str, answers: list[str], overlap: float, exact: float) -> None:
    assert f1(predicted, answers) == pytest.approx(overlap, abs=1e-15)
    assert exact_match(predicted, answers) == exact


def test_normalisation_is_squads() -> None:
    assert normalised("  The U.S. 'Anthem',\tan A-side ") == "us anthem aside"


def test_evaluation_counts_by_question() -> None:
    class Fixed(torch.nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            hot = torch.nn.functional.one_hot(torch.full_like(batch["start"], 1), batch["passage"].shape[1]).double()
            return hot, hot  # always says: the second word

    rows = [
        Question(Passage("x right z"), ("?",), 1, 1, ("right",)),
        Question(Passage("x right z"), ("?",), 1, 2, ("right z",)),
    ]
    score, exact = evaluate(Fixed(), rows, Vocabulary(rows))  # type: ignore[arg-type]
    assert score == pytest.approx((1 + 2 / 3) / 2)
    assert exact == 0.5


def test_saved_bytes_counts_a_storage_once_and_forgets_it_when_freed() -> None:
    weight = torch.ones(1000, 1000, requires_grad=True)
    x = torch.ones(1, 1000)
    with SavedBytes(ignore=[weight, x]) as saved:
        for _ in range(3):  # one after the other: never more than one is kept
            y = x @ weight  # keeps x and weight, which are there anyway
            z = y.exp()  # keeps its result
            (z * z.view(-1)).sum().backward()  # keeps the same storage twice more
    assert saved.peak == 4000
    x.requires_grad_()  # so that weight is kept, once
    with SavedBytes() as saved:
        kept = [(x @ weight).exp().sum() for _ in range(3)]
        assert saved.peak == 4_000_000 + 4000 + 3 * 4000
        del kept


# --- the experiment -----------------------------------------------------------------------------------------------


def test_whole_and_cut_agree_and_accumulated_does_not(result: Result) -> None:
    arms = result.arms
    assert tuple(arms) == ARMS
    assert arms["whole"].difference_at_end == 0
    assert arms["cut"].difference_from_whole < 1e-11
    assert arms["cut"].difference_at_end < 1e-10
    assert arms["accumulated"].difference_from_whole > 1e-5
    assert arms["cut"].f1 == arms["whole"].f1 and len(arms["cut"].f1) == 2
    assert all(len(steps) == TINY.steps for arm in arms.values() for steps in arm.differences)
    for name in ("accumulated", "cut"):
        assert 0.3 < arms[name].saved_bytes / arms["whole"].saved_bytes < 0.7


def test_the_same_seed_gives_the_same_result(questions: Questions, result: Result) -> None:
    again = run(questions, replace(TINY, seeds=1), progress=False)
    for name, arm in again.arms.items():
        assert arm.f1 == result.arms[name].f1[:1]
        assert arm.differences == result.arms[name].differences[:1]


def test_the_reader_learns(questions: Questions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far above what picking any word would get, after some hundred questions."""
    monkeypatch.setattr(experiment, "ARMS", ("whole",))
    before = torch.get_rng_state()
    trained = run(questions, Settings(seeds=1, steps=14, batch=20, rows=20, held_out=60, size=12), progress=False)
    chance = fmean(1 / len(q.passage.words) for q in questions.items)
    assert trained.arms["whole"].f1[0] > 5 * chance > 0.1
    assert torch.equal(torch.get_rng_state(), before)


def test_too_few_questions_or_uneven_rows_are_refused(questions: Questions) -> None:
    with pytest.raises(
        CutError, match=r"of 9 questions \d are for training and \d held out, but one batch alone takes 8"
    ):
        run(Questions("a file", questions.items[:9]), TINY, progress=False)
    with pytest.raises(CutError, match=r"rows=3 does not divide batch=8.*write a number of rows that divides 8"):
        run(questions, replace(TINY, rows=3), progress=False)


def test_json_holds_what_the_table_shows(result: Result) -> None:
    report = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    for name in ARMS:
        arm = report["arms"][name]
        assert len(arm["f1"]) == len(arm["exact_match"]) == TINY.seeds
        for key in ("difference_from_whole", "difference_at_end", "saved_bytes", "seconds"):
            assert isinstance(arm[key], (int, float))
    assert report["settings"]["batch"] == 8
    assert report["data"]["trained_on"] == result.trained_on
    assert table(result).splitlines()[3].split()[0] == "cut"
    assert f"{report['arms']['accumulated']['difference_from_whole']:.1e}" in table(result).splitlines()[2]


def test_the_sentence_follows_the_numbers(result: Result) -> None:
    said = sentence(result)
    assert said in summary(result) and "\n" not in said
    assert said.startswith("After one step cut agrees with whole to rounding (largest parameter difference ")
    assert ", accumulated differs from whole (" in said
    assert "in F1 cut equals whole" in said
    arms = dict(result.arms)
    arms["cut"] = replace(arms["accumulated"], f1=[0.9, 0.8])
    arms["accumulated"] = result.arms["cut"]
    arms["whole"] = replace(arms["whole"], f1=[0.5, 0.5])
    said = sentence(replace(result, arms=arms))
    assert said.startswith("After one step cut differs from whole (")
    assert ", accumulated agrees with whole to rounding (" in said
    assert "cut is 0.3500 above whole (more than the seeds' spread of 0.0707)" in said
    arms["cut"] = replace(arms["cut"], f1=[0.1, 0.8])
    said = sentence(replace(result, arms=arms))
    assert "cut is 0.0500 below whole (no more than the seeds' spread of 0.4950)" in said
    for name in ARMS:
        arms[name] = replace(arms[name], f1=[0.1 if name == "cut" else 0.2])
    said = sentence(replace(result, arms=arms))
    assert "cut is 0.1000 below whole (of one seed, which can't tell that from chance)" in said


def test_the_picture_is_drawn(result: Result, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "demo.png"
    check_plot(path)
    plot(result, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    exact = replace(result.arms["cut"], differences=[[0.0, 0.0]])  # nothing to show on a logarithmic axis
    plot(replace(result, arms={**result.arms, "cut": exact}), path)
    with pytest.raises(CutError, match=r"--plot demo.doc: write a name that ends in one of .*\.png"):
        check_plot("demo.doc")


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CutError, match=r'--plot needs matplotlib: pip install "batchsplit\[plot\]"'):
        check_plot("demo.png")
