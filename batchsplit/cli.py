"""The command line: each sub-command is added by a small function of its own, and says an error in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import batchsplit
from batchsplit import demo, explain_command
from batchsplit.checking import command as check_command
from batchsplit.errors import CutError

DEBUG = "show an error's traceback"

# Each adds its sub-command to argparse's `commands`, with `run` among its defaults: a function of the parsed arguments
# that returns the exit code.
COMMANDS: tuple[Callable[[Any], None], ...] = (
    demo.add_command,
    check_command.add_command,
    explain_command.add_command,
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """The parser of everything `batchsplit` takes."""
    whole = Parser(prog="batchsplit", description=batchsplit.__doc__)
    whole.add_argument("--version", action="version", version=f"batchsplit {batchsplit.__version__}")
    whole.add_argument("--debug", action="store_true", help=DEBUG)
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add_command in COMMANDS:
        add_command(commands)
    for command in commands.choices.values():  # --debug before or after the command
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=DEBUG)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 2 for what the user can put right, said in one line on stderr."""
    args = parser().parse_args(arguments)
    try:
        return args.run(args)
    except (CutError, OSError) as error:
        if args.debug:
            raise
        print(f"batchsplit {args.command}: error: {_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if args.debug:
            raise
        print(f"batchsplit {args.command}: interrupted", file=sys.stderr)
        return 130


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())
