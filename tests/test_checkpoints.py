"""Which directory counts as a checkpoint, and what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.controller import checkpoints
from moerl.models.source import open_source


class Files:
    """Stands for a role where only files matter: writes one, and remembers what it was told to load."""

    def save(self, path: str) -> None:
        Path(path).mkdir()
        (Path(path) / "weights").write_text("abc")

    def load(self, path: str) -> None:
        self.loaded = path


@pytest.fixture
def start(tiny_moe):
    return open_source(tiny_moe)


def test_keeps_the_newest_and_finds_them(tmp_path, start):
    for step in (1, 2, 3):
        checkpoints.save(tmp_path, step, {"actor": Files()}, {"data": {"position": step}}, keep=2, start=start)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000003"]
    actor, newest = Files(), checkpoints.latest(tmp_path)
    assert checkpoints.read(newest, ["actor"]) == {"step": 3, "data": {"position": 3}}
    checkpoints.load(newest, {"actor": actor})
    assert actor.loaded == str(tmp_path / "step_000003" / "actor")


def test_unfinished_one_is_never_taken_for_whole(tmp_path, start):
    checkpoints.save(tmp_path, 1, {"actor": Files()}, {}, keep=2, start=start)

    class Crash(Files):
        def save(self, path):
            super().save(path)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(tmp_path, 2, {"actor": Crash()}, {}, keep=2, start=start)
    assert (tmp_path / "step_000002").is_dir() and checkpoints.latest(tmp_path).name == "step_000001"
    checkpoints.save(tmp_path, 3, {"actor": Files()}, {}, keep=2, start=start)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000003"], "what was never finished is cleared away"


@pytest.mark.parametrize(("damage", "words"), [("cut", "2 bytes, the manifest says 3"), ("gone", "missing, the manifest says 3")])
def test_damaged_file_is_named(tmp_path, start, damage, words):
    path = checkpoints.save(tmp_path, 1, {"actor": Files()}, {}, keep=1, start=start)
    weights = path / "actor" / "weights"
    weights.write_text("ab") if damage == "cut" else weights.unlink()
    with pytest.raises(checkpoints.CheckpointError, match=f"actor/weights: {words}"):
        checkpoints.read(path, ["actor"])


def test_role_that_was_not_saved_is_named(tmp_path, start):
    path = checkpoints.save(tmp_path, 1, {"actor": Files()}, {}, keep=1, start=start)
    with pytest.raises(checkpoints.CheckpointError, match="holds actor, not critic"):
        checkpoints.read(path, ["actor", "critic"])
