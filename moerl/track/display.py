"""What a person watching the terminal sees: one live line while the run goes on, one table when it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

RL_COLUMNS = {
    "step": "step",
    "reward": "reward",
    "kl": "KL",
    "entropy": "entropy",
    "value_loss": "value loss",
    "tokens_per_s": "tokens/s",
    "sync_s": "sync time (s)",
}
MAX_ROWS = 16


class Progress:
    """Times the phases of each step and shows where the run is.

    With `enabled` and a terminal behind stderr it is one live line; otherwise every step prints one plain line.

        with Progress(steps=100) as progress:
            for step in range(1, 101):
                progress.begin(step)
                with progress.phase("rollout"):
                    ...
                progress.end({"reward": 0.5})  # progress.times == {"rollout": seconds}
    """

    def __init__(self, steps: int, enabled: bool = True, console: Console | None = None) -> None:
        self.steps = steps
        self.times: dict[str, float] = {}  # seconds a phase of this step took; a phase entered twice adds up
        self._console = console or Console(stderr=True)
        self._step, self._phase, self._shown = 0, "starting", ""
        self._start = self._step_start = time.perf_counter()
        self._spinner = Spinner("dots")
        self._live = None
        if enabled and self._console.is_terminal:
            self._live = Live(
                get_renderable=self._line, console=self._console, refresh_per_second=4, transient=True
            )

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def begin(self, step: int) -> None:
        """Starts a step (counted from 1) and forgets the last one's times."""
        self._step, self.times, self._step_start = step, {}, time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows `name` and adds the seconds inside to `times[name]`."""
        before, self._phase = self._phase, name
        start = time.perf_counter()
        try:
            yield
        finally:
            self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - start
            self._phase = before

    def end(self, values: dict[str, float]) -> None:
        """Ends a step; shows its reward, or its loss where there is no reward."""
        self._shown = "".join(f"  {key} {values[key]:.4g}" for key in ("reward", "loss") if key in values)
        self._phase = "between steps"
        if self._live:
            return
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.times.items())
        took = time.perf_counter() - self._step_start
        line = f"step {self._step}/{self.steps}{self._shown}  {took:.1f} s" + (f" ({phases})" if phases else "")
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _line(self) -> Spinner:
        minutes, seconds = divmod(int(time.perf_counter() - self._start), 60)
        place = f"step {self._step}/{self.steps}  {self._phase}"
        self._spinner.update(text=f"{place}  {minutes}:{seconds:02d}{self._shown}")
        return self._spinner


def table(
    rows: Sequence[dict[str, Any]], columns: dict[str, str] = RL_COLUMNS, console: Console | None = None
) -> None:
    """Prints metrics rows (as in metrics.jsonl) as a table; `columns` maps a metric to its title.

    A long run shows its first, its last and evenly spaced rows between. A column without a value in any row is left
    out.
    """
    shown = [rows[i] for i in _spaced(len(rows), MAX_ROWS)]
    used = {key: title for key, title in columns.items() if any(row.get(key) is not None for row in rows)}
    grid = Table(header_style="bold")
    cells = []
    for key, title in used.items():
        grid.add_column(title, justify="right", no_wrap=True)
        cells.append(_formatted([row.get(key) for row in shown]))
    for line in zip(*cells):
        grid.add_row(*line)
    (console or Console()).print(grid)


def _spaced(count: int, most: int) -> list[int]:
    """At most `most` indices of `count`, evenly spaced, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _formatted(values: Sequence[float | None]) -> list[str]:
    """One column's numbers with the same decimals: four digits for the largest, none for whole numbers."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    largest = max((abs(v) for v in finite), default=0.0)
    whole = all(v == int(v) for v in finite)
    decimals = 0 if whole else min(6, max(0, 3 - math.floor(math.log10(largest))))
    return ["" if v is None else f"{v:,.{decimals}f}" for v in values]
