"""The numbers of every step: metrics.jsonl (the record) and TensorBoard events (optional)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class Metrics:
    """Appends the metrics of each step to `output`/metrics.jsonl and, with `tensorboard`, to `output`/tensorboard.

    `resume_step` is the last step the run goes on from. Lines of later steps (all lines, for None: a new run) leave
    metrics.jsonl for metrics.jsonl.superseded, and TensorBoard hides those steps, so that a resumed run reads as if it
    had never stopped.
    """

    def __init__(self, output: Path, tensorboard: bool = True, resume_step: int | None = None) -> None:
        output = Path(output)
        output.mkdir(parents=True, exist_ok=True)
        self.path = output / "metrics.jsonl"
        if self.path.exists():
            _supersede(self.path, resume_step)
        self._file = open(self.path, "a")
        self._events = _Events(output / "tensorboard", resume_step) if tensorboard else None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        if self._events:
            self._events.close()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Records one step; readers see it at once.

        Raises ValueError for a value that is no number and for a metric named step.
        """
        if "step" in values:
            raise ValueError("a metric may not be named step")
        line = {"step": int(step)}
        for name, value in values.items():
            try:
                line[name] = float(value)
            except (TypeError, ValueError):
                raise ValueError(f"metric {name} of step {step} is {value!r}, not a number") from None
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._events:
            self._events.add(line)


def read(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, in order; a last line cut short by a crash is left out.

    Raises FileNotFoundError, and ValueError for a broken line elsewhere.
    """
    lines = Path(path).read_text().splitlines(keepends=True)
    rows = [_parse(line) for line in lines]
    for number, row in enumerate(rows, 1):
        if row is None and number < len(rows):
            raise ValueError(f"{path}, line {number}: not a metrics line")
    return [row for row in rows if row is not None]


def _parse(line: str) -> dict[str, Any] | None:
    """The metrics of a complete line, else None."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and "step" in row and line.endswith("\n") else None


def _supersede(path: Path, resume_step: int | None) -> None:
    kept, dropped = [], []
    for line in path.read_text().splitlines(keepends=True):
        row = _parse(line)
        keep = row is not None and resume_step is not None and row["step"] <= resume_step
        (kept if keep else dropped).append(line.rstrip("\n") + "\n")
    if not dropped:
        return
    # In this order a crash between the two writes repeats lines, and loses none.
    with open(path.with_name(f"{path.name}.superseded"), "a") as file:
        file.writelines(dropped)
        file.flush()
        os.fsync(file.fileno())
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)


class _Events:
    """TensorBoard scalars through tensorboard's own writer: 0.25 s to import, against 1.5 s of torch's."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder), flush_secs=10)
        # TensorBoard hides the earlier files' events from this step on.
        first = 0 if resume_step is None else resume_step + 1
        self._write(step=first, session_log=SessionLog(status=SessionLog.START))

    def add(self, line: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in line.items() if name != "step"]
        self._write(step=line["step"], summary=Summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _write(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), **event))
