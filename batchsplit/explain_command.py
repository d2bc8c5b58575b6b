"""`batchsplit explain MODULE:FUNCTION`: how a batch of the user's would be cut."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from batchsplit.containers import codec_of
from batchsplit.cuts import Cut
from batchsplit.cutter import BatchCutter
from batchsplit.errors import CutError
from batchsplit.group import Group
from batchsplit.layout import registered
from batchsplit.named_function import could_not_run, named_function
from batchsplit.special import special_kind

EXAMPLE = """\
FUNCTION takes nothing and returns a batch, a loader of batches (its first one is taken), either of them with a cutter,
or a cut:

    def first_batch():
        return make_loader(), BatchCutter(rows=8, layout={"cache_position": SHARED})

Exit code: 0, or 2 where the batch can't be cut: the message then says what to declare.
"""


def add_command(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "explain",
        help="how would a batch be cut, leaf by leaf, and why?",
        description="Say what each leaf of a batch is taken for and why, and the sizes of the sub-batches.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="what gives the batch or the loader")
    limits = parser.add_mutually_exclusive_group()
    for name, what in (("rows", "rows"), ("area", "padded positions")):
        limits.add_argument(f"--{name}", type=int, help=f"at most so many {what} a sub-batch")
    limits.add_argument("--parts", type=int, help="so many sub-batches")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the text."""
    limits = {name: getattr(args, name) for name in ("rows", "area", "parts")}
    try:
        print(_cut(args.function, named_function(args.function)(), limits).explain())
    except (CutError, OSError):
        raise  # said in one line
    except Exception as error:
        if getattr(args, "debug", False):
            raise
        raise could_not_run(args.function, error) from error
    return 0


def _cut(name: str, given: Any, limits: dict[str, Any]) -> Cut:
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], BatchCutter):
        given, cutter = given
        if any(limit is not None for limit in limits.values()):
            raise CutError(f"{name} gives a cutter of its own, so leave out --rows, --area and --parts.")
    else:
        cutter = BatchCutter(**limits)
    if not isinstance(given, Cut) and not _is_batch(given):
        given = next(iter(given), None)
        if given is None:
            raise CutError(f"{name} gives a loader without a batch.")
    return given if isinstance(given, Cut) else cutter.cut(given)


def _is_batch(value: Any) -> bool:
    known = isinstance(value, (Group, torch.Tensor, np.ndarray, str, bytes)) or registered(type(value)) is not None
    return known or codec_of(value) is not None or special_kind(value) is not None or not hasattr(value, "__iter__")
