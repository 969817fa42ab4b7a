"""Which directory counts as a checkpoint, and what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.controller import checkpoints
from moerl.models.source import open_source
from moerl.rollout.remote import RemoteError


class Files:
    """Stands for a role where only files matter: writes one, and remembers what it was told to load."""

    def start_save(self, path: str) -> None:
        Path(path).mkdir()
        (Path(path) / "weights").write_text("abc")

    def written(self, wait: bool = False) -> float:
        return 0.0

    def finish_save(self) -> None:
        pass

    def load(self, path: str) -> None:
        self.loaded = path


def save(root, step, roles, driver, keep, start):
    with checkpoints.Saver(root, roles, start, keep=keep, background=False) as saver:
        saver.save(step, driver)
    return checkpoints.latest(root)


@pytest.fixture
def start(tiny_moe):
    return open_source(tiny_moe)


def test_keeps_the_newest_and_finds_them(tmp_path, start):
    for step in (1, 2, 3):
        save(tmp_path, step, {"actor": Files()}, {"data": {"position": step}}, keep=2, start=start)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000003"]
    actor, newest = Files(), checkpoints.latest(tmp_path)
    assert checkpoints.read(newest, ["actor"]) == {"step": 3, "data": {"position": 3}}
    checkpoints.load(newest, {"actor": actor})
    assert actor.loaded == str(tmp_path / "step_000003" / "actor")


def test_unfinished_one_is_never_taken_for_whole(tmp_path, start):
    save(tmp_path, 1, {"actor": Files()}, {}, keep=2, start=start)

    class Crash(Files):
        def start_save(self, path):
            super().start_save(path)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, {"actor": Crash()}, {}, keep=2, start=start)
    assert (tmp_path / "step_000002").is_dir() and checkpoints.latest(tmp_path).name == "step_000001"
    save(tmp_path, 3, {"actor": Files()}, {}, keep=2, start=start)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000003"], "what was never finished is cleared away"


@pytest.mark.parametrize(("damage", "words"), [("cut", "2 bytes, the manifest says 3"), ("gone", "missing, the manifest says 3")])
def test_damaged_file_is_named(tmp_path, start, damage, words):
    path = save(tmp_path, 1, {"actor": Files()}, {}, keep=1, start=start)
    weights = path / "actor" / "weights"
    weights.write_text("ab") if damage == "cut" else weights.unlink()
    with pytest.raises(checkpoints.CheckpointError, match=f"actor/weights: {words}"):
        checkpoints.read(path, ["actor"])


def test_role_that_was_not_saved_is_named(tmp_path, start):
    path = save(tmp_path, 1, {"actor": Files()}, {}, keep=1, start=start)
    with pytest.raises(checkpoints.CheckpointError, match="holds actor, not critic"):
        checkpoints.read(path, ["actor", "critic"])


# ---- one that is written while the run goes on


class Slow(Files):
    """A role whose files are there when someone says so."""

    def __init__(self):
        self.ready = self.finished = 0
        self.error: Exception | None = None

    def written(self, wait: bool = False) -> float | None:
        if self.error:
            error, self.error = self.error, None
            raise error
        self.ready += wait
        return 1.5 if self.ready else None

    def finish_save(self) -> None:
        self.finished += 1
        if self.finished == 3:
            raise RemoteError("actor rank 0 failed: no room")


def test_the_manifest_waits_for_every_role(tmp_path, start):
    actor, critic = Slow(), Slow()
    saver = checkpoints.Saver(tmp_path, {"actor": actor, "critic": critic}, start, keep=2, background=True)
    saver.save(1, {})
    for role in (actor, critic):
        saver.poll()
        assert checkpoints.latest(tmp_path) is None and actor.finished == critic.finished == 0
        role.ready = 1
    assert list(saver.times()) == ["time/save_blocked_s"] and saver.times() == {}
    saver.poll()
    assert checkpoints.latest(tmp_path).name == "step_000001" and saver.times()["time/save_background_s"] == 1.5
    saver.poll()
    assert actor.finished == critic.finished == 1 and saver.times() == {}


def test_one_at_a_time(tmp_path, start):
    actor = Slow()
    saver = checkpoints.Saver(tmp_path, {"actor": actor}, start, keep=2, background=True)
    saver.save(1, {})
    saver.save(2, {})
    assert checkpoints.latest(tmp_path).name == "step_000001" and actor.finished == 1


@pytest.mark.parametrize("error", [None, RuntimeError("elsewhere"), KeyboardInterrupt()])
def test_nothing_is_pending_when_a_run_ends(tmp_path, start, error):
    try:
        with checkpoints.Saver(tmp_path, {"actor": Slow()}, start, keep=2, background=True) as saver:
            saver.save(1, {})
            if error:
                raise error
    except BaseException as seen:
        assert seen is error
    assert checkpoints.latest(tmp_path).name == "step_000001" and saver.pending is None


def test_a_failure_is_raised_after_the_newer_state_had_its_try(tmp_path, start, capsys):
    actor = Slow()
    saver = checkpoints.Saver(tmp_path, {"actor": actor}, start, keep=2, background=True)
    saver.save(1, {})
    saver.save(2, {})
    actor.error = RemoteError("actor rank 3 failed: no room")
    with pytest.raises(RemoteError, match="the checkpoint of step 2 could not be written: actor rank 3 failed: no room"):
        saver.save(3, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000003"] and saver.pending is None
    saver.save(4, {})
    actor.error = RemoteError("actor rank 3 failed: no room")
    saver.settle()
    assert "the checkpoint of step 4" in capsys.readouterr().out and checkpoints.latest(tmp_path).name == "step_000003"


def test_ranks_that_wait_for_a_failed_one_are_asked_nothing_more(tmp_path, start):
    """Rank 0 alone writes the metadata; where it fails, the others still wait for it, and another save would wait for them."""
    actor = Slow()
    saver = checkpoints.Saver(tmp_path, {"actor": actor}, start, keep=2, background=True)
    for step in (1, 2, 3):
        saver.save(step, {})
    for step in (4, 5):
        with pytest.raises(RemoteError, match="the checkpoint of step 3 could not be written: actor rank 0 failed: no room"):
            saver.save(step, {})
    saver.settle()
    assert actor.finished == 3 and sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000002"]
