"""The command line: exit codes, errors of one line, figures as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import batchsplit
from batchsplit.cli import main
from batchsplit.demo import cloze, experiment


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of a tiny reader on fewer questions, instead of the command's own settings."""
    monkeypatch.setattr(cloze, "docstrings", lambda: ())
    full = experiment.run

    def run(questions: experiment.Questions, settings: experiment.Settings) -> experiment.Result:
        assert settings.seeds == 2 and settings.steps == 3
        small = experiment.Settings(seeds=2, steps=3, batch=8, rows=4, held_out=10, size=4, dtype=settings.dtype)
        return full(questions, small)

    monkeypatch.setattr(experiment, "run", run)


def test_demo_prints_one_table_and_writes_json(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert main(["demo", "--quick", "--steps", "3", "--json", str(path)]) == 0
    output = capsys.readouterr()
    rows = [line.split()[0] for line in output.out.splitlines() if line.split()]
    assert [row for row in rows if row in experiment.ARMS] == list(experiment.ARMS)
    assert "training, seed 2 of 2" in output.err  # progress bars stay out of the way of the table
    report = json.loads(path.read_text("utf-8"))
    assert set(report["arms"]) == {"whole", "accumulated", "cut"}
    keys = {"f1", "exact_match", "difference_from_whole", "difference_at_end", "saved_bytes", "seconds"}
    assert all(keys <= set(arm) for arm in report["arms"].values())
    assert (
        report["arms"]["cut"]["difference_from_whole"] < 1e-11 < report["arms"]["accumulated"]["difference_from_whole"]
    )
    assert report["machine"]["batchsplit"] == batchsplit.__version__
    assert report["sentence"] in output.out


def test_float32_agrees_to_its_own_rounding(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert main(["demo", "--seeds", "2", "--steps", "3", "--dtype", "float32", "--json", str(path)]) == 0
    report = json.loads(path.read_text("utf-8"))
    assert report["settings"]["dtype"] == "float32"
    assert 0 < report["arms"]["cut"]["difference_from_whole"] < 1e-4
    assert "cut agrees with whole to rounding" in capsys.readouterr().out


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1 and output.err.endswith("\n")
    return output.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["nope"], "invalid choice: 'nope'"),
        (["demo", "--seeds", "0"], "argument --seeds: '0' is no whole number of at least 1"),
        (["demo", "--steps", "many"], "argument --steps: 'many' is no whole number of at least 1"),
        (["demo", "--dtype", "float16"], "invalid choice: 'float16'"),
        (["demo", "--what"], "unrecognized arguments: --what"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in error_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--squad", "missing.json"], "batchsplit demo: error: missing.json: No such file or directory"),
        (["demo", "--squad", "broken.json"], "batchsplit demo: error: broken.json: no JSON"),
        (["demo", "--squad", "empty.json"], "batchsplit demo: error: empty.json: no question to learn from"),
        (["demo", "--squad", "small.json"], "small.json: of 1 questions 0 are for training and 1 held out"),
        (["demo", "--longest", "9"], "--longest goes with --squad FILE"),
        (
            ["demo", "--json", "no/such/place.json"],
            "--json no/such/place.json: that is no file in a directory that can",
        ),
        (["demo", "--plot", "."], "--plot .: that is no file"),
    ],
)
def test_bad_files_are_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_bytes(b"\xff{")
    Path("empty.json").write_text('{"data": []}')
    entry = {"question": "What?", "answers": [{"text": "notes", "answer_start": 4}]}
    Path("small.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": "Her notes.", "qas": [entry]}]}]}))
    assert main(arguments) == 2
    assert message in error_line(capsys)


def test_debug_shows_the_traceback() -> None:
    for arguments in (["--debug", "demo", "--longest", "9"], ["demo", "--longest", "9", "--debug"]):
        with pytest.raises(batchsplit.CutError, match="--longest goes with"):
            main(arguments)


def test_module_and_version() -> None:
    done = subprocess.run([sys.executable, "-m", "batchsplit", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"batchsplit {batchsplit.__version__}\n"


def test_missing_matplotlib_is_said_before_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(experiment, "run", lambda *_: pytest.fail("trained first"))
    assert main(["demo", "--plot", str(tmp_path / "demo.png")]) == 2
    assert 'pip install "batchsplit[plot]"' in error_line(capsys)
