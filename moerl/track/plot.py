"""The reward curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moerl.track.metrics import read

PANELS = {"kl": "KL to reference", "entropy": "entropy (nats)"}
BLUE, PALE = "#1f5fa8", "#9dbfe3"


def reward_curve(metrics_path: Path, png_path: Path) -> Path:
    """Draws the reward of each step with its moving average, and KL and entropy beneath where the run has them.

    Raises ValueError when the metrics hold no reward.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read(metrics_path)
    steps, rewards = _series(rows, "reward")
    if not steps:
        raise ValueError(f"{metrics_path} holds no reward")
    panels = [key for key in PANELS if _series(rows, key)[0]]
    figure = Figure(figsize=(8.8, 5.4 if panels else 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2 if panels else 1, max(1, len(panels)), height_ratios=[2.2, 1] if panels else None)
    axes = figure.add_subplot(grid[0, :])
    window = max(1, min(25, len(steps) // 10))
    axes.plot(steps, rewards, color=PALE if window > 1 else BLUE, linewidth=1.2, label="mean reward of the step")
    if window > 1:
        label = f"moving average of {window} steps"
        axes.plot(steps, _moving_average(rewards, window), color=BLUE, linewidth=2.2, label=label)
    axes.legend(frameon=False, loc="lower right")
    _dress(axes, "reward")
    for column, key in enumerate(panels):
        small = figure.add_subplot(grid[1, column])
        small.plot(*_series(rows, key), color=BLUE, linewidth=1.4)
        _dress(small, PANELS[key])
    Path(png_path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path, dpi=160)
    return Path(png_path)


def _series(rows: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _moving_average(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and the `window` - 1 before it (fewer at the start)."""
    means = []
    for i in range(len(values)):
        last = values[max(0, i + 1 - window) : i + 1]
        means.append(sum(last) / len(last))
    return means


def _dress(axes: Any, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.set_ylabel(title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, color="#e3e3e3", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
