"""The code of docs/add_a_family.md is the code that runs: its blocks, put together, are the files that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "add_a_family.md").read_text()
BLOCK = re.compile(r"^`(\S+)`:\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code(text: str) -> list[str]:
    """Lines that are not empty."""
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("file", ["moerl/models/olmoe.py", "tests/test_families_olmoe.py"])
def test_blocks_are_the_file(file):
    assert code("\n".join(text for name, text in BLOCK.findall(PAGE) if name == file)) == code((ROOT / file).read_text())


def test_no_block_is_left_untested():
    assert PAGE.count("```python") == len(BLOCK.findall(PAGE))
    assert {name for name, _ in BLOCK.findall(PAGE)} == {"moerl/models/olmoe.py", "tests/test_families_olmoe.py"}
    assert '"olmoe": olmoe' in PAGE and '"olmoe": olmoe' in (ROOT / "moerl" / "models" / "__init__.py").read_text()


def test_what_the_page_points_to_is_there():
    for target in re.findall(r"\]\((\.\./[^)]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
    for name in re.findall(r"`((?:tests|moerl)/[\w/]+\.py)`", PAGE):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_the_page_is_linked(page):
    assert "add_a_family.md)" in (ROOT / page).read_text()
