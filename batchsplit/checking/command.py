"""`batchsplit check MODULE:FUNCTION`: the report on what a function of the user's gives."""

from __future__ import annotations

import argparse
from typing import Any

from torch import nn

from batchsplit.checking.procedure import ROWS, check
from batchsplit.errors import CutError
from batchsplit.named_function import could_not_run, named_function

EXAMPLE = """\
FUNCTION takes nothing and returns (model, batch, loss_fn) or (model, batch, loss_fn, cutter):

    def training():
        model, loader = MyModel(), make_loader()
        return model, next(iter(loader)), lambda data: model(**data).loss, BatchCutter(rows=8)

Exit code: 0 where the cut is exact, 1 where it is not, 2 where it could not be run.
"""


def add_command(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "check",
        help="does the cut train as the unsplit batch would, and if not, why?",
        description="Compare unsplit and cut training on a real batch, in float64, and find out why they differ.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "function", metavar="MODULE:FUNCTION", help="what gives the model, a batch, the loss and the cutter"
    )
    parser.add_argument(
        "--rows", type=int, default=ROWS, help="run at most so many rows of the batch (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit code says how it came out."""
    if args.rows < 2:
        raise CutError(f"--rows {args.rows}: a check needs two rows or more.")
    try:
        report = check(*_given(args.function), rows=args.rows)
    except (CutError, OSError):
        raise  # said in one line
    except Exception as error:
        if getattr(args, "debug", False):
            raise
        raise could_not_run(args.function, error) from error
    print(report)
    return 0 if report.exact else 1


def _given(name: str) -> tuple[Any, ...]:
    given = named_function(name)()
    if not isinstance(given, tuple) or len(given) not in (3, 4) or not isinstance(given[0], nn.Module):
        raise CutError(f"{name} has to return (model, batch, loss_fn) or (model, batch, loss_fn, cutter).")
    return given
