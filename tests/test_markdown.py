"""Every ```python block of README.md and docs/ runs, in order, one namespace a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

sybil = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()])


def run(page: Path) -> int:
    """Run a page's blocks and return how many there were."""
    examples = list(sybil.parse(page).examples())
    for example in examples:
        example.evaluate()
    return len(examples)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what a page writes goes nowhere
    fences = re.findall(r"^ *```python\b", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert run(page) >= len(fences), "a block that sybil does not see is a block that nobody has run"


def test_a_broken_block_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\none = 1\n```\n\nText.\n\n```python\nassert one == 2\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError):
        run(page)


def test_a_wrong_output_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\n>>> 1 + 1\n3\n\n```\n", encoding="utf-8")
    with pytest.raises(Exception, match="Expected"):
        run(page)
