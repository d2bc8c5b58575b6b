"""What accumulation's own padding does to a reader, and that a cut does not: `batchsplit demo`."""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchsplit.errors import CutError

if TYPE_CHECKING:
    from batchsplit.demo.experiment import Settings
    from batchsplit.demo.text import Questions

DESCRIPTION = """\
Trains a small reading-comprehension model three times from the same weights on the same questions in the same order:

  whole        40 rows padded together, one backward
  accumulated  2 × 20 rows, each padded by itself, gradients added up: what trainers do
  cut          40 rows padded together, cut in 20s by batchsplit

and says how far the last two come from the first, in parameters, answers and memory.
"""


def add_command(commands: Any) -> None:
    """Add `demo` to argparse's sub-commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="train one model whole, accumulated and cut, and compare",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer seeds and steps, under half a minute on two cores")
    parser.add_argument("--seeds", type=count, metavar="N", help="how often to repeat it with other weights and order")
    parser.add_argument("--steps", type=count, metavar="N", help="optimizer steps of each arm")
    parser.add_argument("--dtype", choices=("float64", "float32"), help="float64 unless told otherwise")
    parser.add_argument(
        "--squad", metavar="FILE", help="questions in SQuAD's JSON format, instead of Python's own documentation"
    )
    parser.add_argument("--longest", type=count, metavar="N", help="leave out paragraphs of FILE with more words")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", metavar="FILE.png", help="draw them there (needs matplotlib)")
    parser.set_defaults(run=run_command)


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return number


def run_command(args: argparse.Namespace) -> int:
    """Run the demo as the command line says, and print its result."""
    from batchsplit.demo.experiment import run
    from batchsplit.demo.plot import check_plot, plot
    from batchsplit.demo.table import sentence, summary

    settings = settings_of(args)
    for option in ("json", "plot"):
        _check_writable(option, getattr(args, option))
    if args.plot:
        check_plot(args.plot)
    result = run(questions_of(args), settings)
    print(summary(result))
    if args.json:
        report = {**result.as_dict(), "sentence": sentence(result), "machine": machine()}
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if args.plot:
        plot(result, args.plot)
    return 0


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that the command line asks for."""
    from batchsplit.demo.experiment import Settings

    settings = Settings(seeds=2, steps=6, held_out=120) if args.quick else Settings()
    asked_for = {name: getattr(args, name) for name in ("seeds", "steps", "dtype")}
    return replace(settings, **{name: value for name, value in asked_for.items() if value is not None})


def questions_of(args: argparse.Namespace) -> Questions:
    """The questions that the command line asks for."""
    from batchsplit.demo.cloze import python_questions
    from batchsplit.demo.squad import squad_questions

    if args.squad is None:
        if args.longest is not None:
            raise CutError("--longest goes with --squad FILE.")
        return python_questions()
    return squad_questions(args.squad, args.longest or (100 if args.quick else 200))


def machine() -> dict[str, Any]:
    """What the figures were measured with."""
    import torch

    from batchsplit import __version__

    return {
        "batchsplit": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "cores": os.cpu_count(),
    }


def _check_writable(option: str, path: str | None) -> None:
    """Raise before the training for a file that could not be written after it."""
    if path and (Path(path).is_dir() or not os.access(Path(path).resolve().parent, os.W_OK)):
        raise CutError(f"--{option} {path}: that is no file in a directory that can be written to.")
