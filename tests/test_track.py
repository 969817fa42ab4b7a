from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import time

import pytest
from rich.console import Console

from moerl.config.schema import SFTConfig
from moerl.track.display import Progress, table
from moerl.track.metrics import Metrics, read
from moerl.track.plot import reward_curve
from moerl.track.record import finish_run, git_state, write_run

CONFIG = SFTConfig.model_validate(
    {"model": {"path": "m"}, "data": {"prompts": "p.jsonl"}, "trainer": {"steps": 3, "output": "o"}}
)

# Run record


def record(folder):
    return json.loads((folder / "run.json").read_text())


def test_run_record(tmp_path):
    output = tmp_path / "new" / "run"
    path = write_run(output, CONFIG, ["moerl", "sft", "x.yaml"], {"trainer": 7}, {"note": 1})
    run = record(output)
    assert path == output / "run.json"
    assert SFTConfig.model_validate(run["config"]) == CONFIG
    assert run["command"] == ["moerl", "sft", "x.yaml"]
    assert run["seeds"] == {"trainer": 7} and run["extra"] == {"note": 1}
    assert run["status"] == "running" and run["end"] is None and run["resumes"] == []
    assert run["packages"]["python"] == sys.version.split()[0] and {"moerl", "torch", "ray"} <= run["packages"].keys()
    assert run["hardware"]["cores"] == os.cpu_count() and run["hardware"]["memory_gib"] > 0 and run["hardware"]["cpu"]
    finish_run(output, "finished")
    assert record(output) == {**run, "status": "finished", "end": record(output)["end"]} and record(output)["end"]
    assert [p.name for p in output.iterdir()] == ["run.json"]  # no temporary file is left


def test_a_resume_keeps_the_first_record(tmp_path):
    write_run(tmp_path, CONFIG, ["first"], {"trainer": 7}, {})
    first = record(tmp_path)
    finish_run(tmp_path, "failed", "out of memory")
    write_run(tmp_path, CONFIG, ["second"], {"trainer": 7}, {"step": 5})  # killed: nobody calls finish_run
    write_run(tmp_path, CONFIG, ["third"], {"trainer": 7}, {})
    run = record(tmp_path)
    assert {key: run[key] for key in first if key != "resumes"} == {k: v for k, v in first.items() if k != "resumes"}
    second, third = run["resumes"]
    assert second["command"] == ["second"] and second["extra"] == {"step": 5}
    assert second["after"]["status"] == "failed" and second["after"]["end"]
    assert second["after"]["error"] == "out of memory"
    assert third["command"] == ["third"] and third["after"] == {"status": "running", "end": None, "error": None}
    finish_run(tmp_path, "finished")
    assert record(tmp_path)["status"] == "finished" and record(tmp_path)["error"] is None


def test_run_record_errors(tmp_path):
    with pytest.raises(ValueError, match="run.json does not exist"):
        finish_run(tmp_path, "finished")
    write_run(tmp_path, CONFIG, [], {}, {})
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(TypeError):  # not JSON: the record there stays whole
        write_run(tmp_path, CONFIG, [], {}, {"bad": object()})
    assert (tmp_path / "run.json").read_bytes() == before
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="is not a run record"):
        write_run(tmp_path, CONFIG, [], {}, {})


def test_git_state(tmp_path):
    source = tmp_path / "a.py"
    source.write_text("1")
    assert git_state(source) is None  # no repository
    git = ["git", "-C", tmp_path, "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_state(source) is None  # in a repository's folder, not tracked by it
    subprocess.run([*git, "add", "a.py"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert git_state(source) == {"commit": commit, "dirty": False}
    source.write_text("2")
    assert git_state(source) == {"commit": commit, "dirty": True}


# Metrics


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(e.step, round(e.value, 4)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_metrics_are_read_back_at_once(tmp_path):
    import numpy
    import torch

    with Metrics(tmp_path) as metrics:
        metrics.log(1, {"reward": 0.5, "kl": torch.tensor(0.25)})
        assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "reward": 0.5, "kl": 0.25}]
        metrics.log(2, {"reward": numpy.float32(0.75), "loss": math.inf})
    assert read(tmp_path / "metrics.jsonl")[1] == {"step": 2, "reward": 0.75, "loss": math.inf}
    assert scalars(tmp_path)["reward"] == [(1, 0.5), (2, 0.75)] and scalars(tmp_path)["kl"] == [(1, 0.25)]


def test_metrics_errors_and_no_tensorboard(tmp_path):
    with Metrics(tmp_path, tensorboard=False) as metrics:
        with pytest.raises(ValueError, match="metric reward of step 4 is None, not a number"):
            metrics.log(4, {"reward": None})
        with pytest.raises(ValueError, match="may not be named step"):
            metrics.log(4, {"step": 1})
    assert read(tmp_path / "metrics.jsonl") == [] and not (tmp_path / "tensorboard").exists()


def test_a_resumed_run_reads_as_if_it_never_stopped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(tmp_path) as metrics:
        for step in range(1, 6):
            metrics.log(step, {"reward": step / 10})
    with path.open("a") as file:
        file.write('{"step": 6, "rew')  # killed while it wrote
    assert [row["step"] for row in read(path)] == [1, 2, 3, 4, 5]
    with Metrics(tmp_path, resume_step=3) as metrics:
        assert [row["step"] for row in read(path)] == [1, 2, 3]
        metrics.log(4, {"reward": 0.9})
        metrics.log(5, {"reward": 0.8})
    rows = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9), (5, 0.8)]
    assert [(row["step"], row["reward"]) for row in read(path)] == rows
    assert scalars(tmp_path)["reward"] == rows
    dropped = (tmp_path / "metrics.jsonl.superseded").read_text().splitlines()
    assert dropped == ['{"step": 4, "reward": 0.4}', '{"step": 5, "reward": 0.5}', '{"step": 6, "rew']
    with Metrics(tmp_path) as metrics:  # a new run in the same folder
        metrics.log(1, {"reward": 0.0})
    assert read(path) == [{"step": 1, "reward": 0.0}] and scalars(tmp_path)["reward"] == [(1, 0.0)]
    assert len((tmp_path / "metrics.jsonl.superseded").read_text().splitlines()) == 8


def test_a_resume_at_the_last_step_changes_nothing(tmp_path):
    with Metrics(tmp_path, tensorboard=False) as metrics:
        metrics.log(1, {"reward": 1})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    Metrics(tmp_path, tensorboard=False, resume_step=1).__exit__()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before and not (tmp_path / "metrics.jsonl.superseded").exists()


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nbroken\n{"step": 2}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2: not a metrics line"):
        read(tmp_path / "metrics.jsonl")


def test_tensorboard_events_need_no_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from moerl.track.metrics import Metrics\n"
        f"with Metrics(Path({str(tmp_path)!r})) as m: m.log(1, {{'reward': 1}})\n"
        "sys.exit('torch' in sys.modules or 'tensorflow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert scalars(tmp_path)["reward"] == [(1, 1.0)]


# Display


def run_two_steps(console, enabled=True):
    with Progress(2, enabled=enabled, console=console) as progress:
        for step, values in ((1, {"reward": 0.25}), (2, {"loss": 1.5})):
            progress.begin(step)
            with progress.phase("rollout"):
                time.sleep(0.02)
            for _ in range(2):
                with progress.phase("update"):
                    time.sleep(0.01)
            with pytest.raises(KeyError), progress.phase("sync"):
                raise KeyError  # a phase that fails is timed too
            progress.end(values)
            assert list(progress.times) == ["rollout", "update", "sync"]
            assert 0.02 <= progress.times["rollout"] < 2 and 0.02 <= progress.times["update"] < 2


def test_plain_progress_is_one_line_a_step():
    for terminal, enabled in ((False, True), (True, False)):
        out = io.StringIO()
        run_two_steps(Console(file=out, force_terminal=terminal, width=20, color_system=None), enabled)
        lines = out.getvalue().splitlines()
        assert len(lines) == 2 and lines[0].startswith("step 1/2  reward 0.25  0.") and "(rollout 0." in lines[0]
        assert lines[1].startswith("step 2/2  loss 1.5  ")


def test_live_progress_on_a_terminal():
    out = io.StringIO()
    with Progress(9, console=Console(file=out, force_terminal=True, width=80)) as progress:
        progress.begin(4)
        progress.end({"reward": 0.5})
        with progress.phase("rollout"):
            time.sleep(0.6)  # the line is drawn four times a second
    assert "step 4/9  rollout  0:00  reward 0.5" in out.getvalue()


def shown(rows, **options):
    out = io.StringIO()
    table(rows, console=Console(file=out, width=120), **options)
    lines = out.getvalue().splitlines()
    lines = [line.strip("│┃").replace("┃", "│") for line in lines if line[:1] in "│┃"]
    cells = [[cell.strip() for cell in line.split("│")] for line in lines]
    return cells[0], cells[1:]


def test_table_of_a_long_run():
    fixed = {"sync_s": 0.05, "entropy": 1.0}
    rows = [{"step": i, "reward": i / 100, "tokens_per_s": 1000.5 + i, **fixed} for i in range(1, 101)]
    header, body = shown(rows)
    assert header == ["step", "reward", "entropy", "tokens/s", "sync time (s)"]  # no KL, no value loss: no critic
    steps = [int(line[0]) for line in body]
    assert len(steps) == 16 and steps[0] == 1 and steps[-1] == 100
    assert {b - a for a, b in zip(steps, steps[1:])} <= {6, 7}
    assert body[0] == ["1", "0.010", "1", "1,002", "0.05000"] and body[-1] == ["100", "1.000", "1", "1,100", "0.05000"]


def test_table_keeps_a_value_that_only_some_rows_have():
    header, body = shown([{"step": 1, "reward": 0.5}, {"step": 2, "reward": math.nan, "value_loss": 0.25}])
    assert header == ["step", "reward", "value loss"] and body == [["1", "0.5000", ""], ["2", "nan", "0.2500"]]
    assert shown([{"step": 1, "loss": 2.5}], columns={"step": "step", "loss": "loss"})[1] == [["1", "2.500"]]


# Plot


def test_reward_curve(tmp_path):
    from matplotlib.image import imread

    with Metrics(tmp_path, tensorboard=False) as metrics:
        for step in range(1, 41):
            metrics.log(step, {"reward": step / 40, "entropy": 1 / step})
    with_entropy = imread(reward_curve(tmp_path / "metrics.jsonl", tmp_path / "plots" / "reward.png"))
    assert with_entropy.shape[1] == 1408 and with_entropy[..., :3].std() > 0.05
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')  # one step, nothing else
    assert imread(reward_curve(tmp_path / "metrics.jsonl", tmp_path / "one.png")).shape[0] < with_entropy.shape[0]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    with pytest.raises(ValueError, match="holds no reward"):
        reward_curve(tmp_path / "metrics.jsonl", tmp_path / "none.png")
