"""What the package shows to the world, and what it keeps out of it: names, documentation, imports."""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import batchsplit

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "batchsplit"

# fmt: off
PUBLIC = [
    "BatchCutter", "Cut", "SubBatch", "CutLoader", "group",
    "row_weight", "label_weight", "mask_weight",
    "StepDriver", "StepReport", "run_step",
    "CutForward", "check", "CheckReport",
    "SHARED", "PER_ROW", "axis", "packed", "register", "join",
    "CutError",
]
# fmt: on

CONSTANTS = {"SHARED", "PER_ROW"}  # objects that carry no docstring of their own

TRAINERS = {"accelerate", "lightning", "pytorch_lightning", "transformers"}
OPTIONAL = TRAINERS | {"matplotlib", "tensordict", "torch_geometric"}

# From the ground up. No module reaches one of a layer above it, by way of others neither.
# Modules that are not named stand where their imports put them.
LAYERS = [
    {"errors"},
    {"plan", "leaves", "weights"},
    {"cutter"},
    {"loader"},
    {"forward", "memory", "ranks", "randomness", "precision"},
    {"driver", "checking"},
    {"trainers", "cli", "demo"},
]
TO_COME = {"trainers"}
# Imports inside a function that point up, each for a method that is only a shorter way to write something.
UPWARD = {("cutter", "loader")}  # cutter.over(loader)


def texts() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def test_public_names_are_those_of_the_contract() -> None:
    assert sorted(batchsplit.__all__) == sorted(PUBLIC)
    assert all(hasattr(batchsplit, name) for name in batchsplit.__all__)


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - CONSTANTS))
def test_public_name_has_a_docstring_with_an_example(name: str) -> None:
    documentation = inspect.getdoc(getattr(batchsplit, name))
    assert documentation, f"{name} has no docstring"
    assert doctest.DocTestParser().get_examples(documentation), f"the docstring of {name} has no example"


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_in_the_documentation(name: str) -> None:
    assert re.search(rf"\b{name}\b", texts()), f"neither README.md nor docs/ mentions {name}"


def test_public_methods_and_properties_are_documented() -> None:
    undocumented = [
        f"{name}.{attribute}"
        for name in batchsplit.__all__
        if inspect.isclass(cls := getattr(batchsplit, name))
        for attribute, value in vars(cls).items()
        if not attribute.startswith("_")
        and (callable(value) or isinstance(value, property))
        and not inspect.getdoc(getattr(cls, attribute))
    ]
    assert not undocumented


def module_of(path: Path) -> str:
    """`cutter` for batchsplit/cutter.py, `demo` for anything in batchsplit/demo/."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(source: str) -> Iterator[str]:
    """Full names of the modules that a source imports anywhere, but for those that only a type checker imports."""
    tree = ast.parse(source)
    unseen = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def arrows() -> set[tuple[str, str]]:
    """(importing, imported) for the modules of the package."""
    found = set()
    for path, source in sources().items():
        importing = module_of(path)
        for name in imports(source):
            package, _, rest = name.partition(".")
            imported = rest.partition(".")[0]
            if package == "batchsplit" and imported and importing not in (imported, "__init__"):
                found.add((importing, imported))
    return found


def faults(arrows: set[tuple[str, str]]) -> list[str]:
    """What is wrong with the direction of imports, in words."""
    graph: dict[str, set[str]] = {}
    for importing, imported in arrows:
        graph.setdefault(importing, set()).add(imported)

    def reached(module: str) -> set[str]:
        found: set[str] = set()
        new = {module}
        while new:
            new = set().union(*(graph.get(one, set()) for one in new)) - found
            found |= new
        return found

    wrong = [
        f"{module} reaches {above}, which is above it"
        for i, layer in enumerate(LAYERS)
        for module in sorted(layer)
        for above in sorted(reached(module) & set().union(*LAYERS[i + 1 :]))
    ]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        wrong.append(f"imports go round in a circle: {' -> '.join(error.args[1])}")
    return wrong


def test_every_layer_is_there() -> None:
    modules = {module_of(path) for path in sources()}
    assert set().union(*LAYERS) - modules <= TO_COME, "a layer that nobody stands on guards nothing"


def test_imports_name_the_module_they_want() -> None:
    modules = {module_of(path) for path in sources()}
    by_the_front = {(a, b) for a, b in arrows() if b not in modules and a not in LAYERS[-1]}
    assert not by_the_front, "an import from batchsplit itself hides which way it points"


def test_imports_point_one_way() -> None:
    assert arrows() >= UPWARD, "an exception that nobody needs any more"
    assert not faults(arrows() - UPWARD)


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (("plan", "cutter"), "plan reaches cutter, which is above it"),
        (("reading", "ranks"), "cutter reaches ranks, which is above it"),
        (("layout", "reading"), "round in a circle"),
    ],
)
def test_an_import_in_the_wrong_direction_is_seen(planted: tuple[str, str], words: str) -> None:
    assert any(words in fault for fault in faults((arrows() - UPWARD) | {planted}))


@pytest.mark.parametrize("module", ["plan", "errors"])
def test_integers_and_errors_need_no_torch(module: str) -> None:
    roots = {name.partition(".")[0] for name in imports((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))}
    assert roots <= {*sys.stdlib_module_names, "batchsplit", "more_itertools"}


def loaded_by(code: str, folder: Path) -> set[str]:
    """The optional packages that a new interpreter has loaded after `code`.

    Empty modules of their names stand in `folder` and come before the real ones, so that even an import
    that would fail, and be caught, is seen.
    """
    for name in sorted(OPTIONAL):
        (folder / f"{name}.py").touch()
    code += f"\nimport sys\nprint(*(sys.modules.keys() & {OPTIONAL!r}))"
    path = os.pathsep.join([str(folder), str(ROOT)])
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_import_loads_no_optional_package(tmp_path: Path) -> None:
    assert loaded_by("import batchsplit", tmp_path) == set()


def test_an_optional_package_that_is_loaded_is_seen(tmp_path: Path) -> None:
    assert loaded_by("import batchsplit, matplotlib, transformers", tmp_path) == {"matplotlib", "transformers"}
