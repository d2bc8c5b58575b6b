"""A function of the user's, named on the command line as MODULE:FUNCTION."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from batchsplit.errors import CutError


def named_function(name: str) -> Callable[[], Any]:
    """The function that `module:function` names; modules are looked for in the current folder too.

    Raises:
        CutError: it is not written so, or there is no such module or function.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise CutError(f"{name!r}: write MODULE:FUNCTION, as in train:check_this.")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise CutError(f"there is no module {error.name!r}, looked for from {here} on.") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise CutError(f"{module_name} has no function {function_name!r}.")
    return function


def could_not_run(name: str, error: Exception) -> CutError:
    """What is said of a user's function that raised something of its own."""
    return CutError(f"{name} could not be run: {type(error).__name__}: {error} (--debug shows where)")
