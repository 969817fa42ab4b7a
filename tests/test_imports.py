"""The arrows of docs/architecture.md: who may import whom, and who may touch megatron, vllm and ray."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "moerl"
# A room may import itself, the rooms named here, and the two leaves below.
ROOMS = {
    "rl": set(),
    "rewards": set(),
    "config": set(),
    "models": set(),
    "track": {"config"},
    "megatron": {"models"},
    "reshard": {"models"},
    "rollout": {"models", "reshard"},
    "controller": {"config", "models", "megatron", "reshard", "rollout", "rl", "rewards", "track"},
}
LEAVES = {"layout", "sample"}
NO_LEAVES = {"rl", "rewards"}
OWNERS = {"megatron": {"megatron"}, "vllm": {"rollout", "reshard"}, "ray": {"controller", "rollout"}}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Every module named in an import statement of the file, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows(path):
    room = path.relative_to(PACKAGE).parts[0]
    names = imported(path)
    for library, owners in OWNERS.items():
        uses = any(name.split(".")[0] == library for name in names)
        assert not uses or room in owners, f"{path} imports {library}"
    if room not in ROOMS:
        return  # cli, demo, doctor: the top, and the leaves, checked below
    allowed = ROOMS[room] | {room} | (set() if room in NO_LEAVES else LEAVES)
    used = {name.split(".")[1] for name in names if name.startswith("moerl.")}
    assert used <= allowed, f"{path} imports {sorted(used - allowed)}"


@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_leaves_import_nothing_of_ours(leaf):
    assert not any(name.startswith("moerl") for name in imported(PACKAGE / f"{leaf}.py"))


def test_every_room_is_listed():
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert rooms == set(ROOMS)
