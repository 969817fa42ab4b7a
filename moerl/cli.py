"""The `moerl` command. Errors a user can mend are one line; everything else keeps its traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from checkpoint_tools.cli import audit, convert, inspect
from moerl.user_errors import user_errors

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

ConfigFile = Annotated[Path, typer.Argument(help="YAML configuration")]
Overrides = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="override one key, e.g. trainer.steps=2")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the resolved configuration and placement, start nothing")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the last complete checkpoint in trainer.output")]


@app.command()
def train(config: ConfigFile, set: Overrides = [], dry_run: DryRun = False, resume: Resume = False) -> None:
    """Reinforcement learning (PPO, GRPO)."""
    from moerl.config.schema import TrainConfig

    with user_errors():
        loaded = _load(config, TrainConfig, set)
        if dry_run:
            from moerl.controller.train import prepare

            return print(prepare(loaded).plan.describe())
        from moerl.controller.train import train as run
        from moerl.track.display import RL_COLUMNS

        _report(run(loaded, resume=resume, command=sys.argv), loaded.trainer.output, RL_COLUMNS)


@app.command()
def sft(config: ConfigFile, set: Overrides = [], dry_run: DryRun = False, resume: Resume = False) -> None:
    """Supervised fine-tuning."""
    from moerl.config.schema import SFTConfig

    with user_errors():
        loaded = _load(config, SFTConfig, set)
        if dry_run:
            from moerl.controller.run import plan

            return print(plan(loaded).describe())
        from moerl.controller.sft import sft as run

        columns = {"step": "step", "loss": "loss", "grad_norm": "grad norm", "lr": "lr", "tokens_per_s": "tokens/s"}
        _report(run(loaded, resume=resume, command=sys.argv), loaded.trainer.output, columns)


@app.command()
def reshard(
    config: Annotated[Path | None, typer.Option("--config", help="YAML configuration of a training run")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="print what a sync moves, and how long it should take")] = False,
    hardware: Annotated[str, typer.Option("--hardware", help="h100, h200 or b200")] = "h100",
    save: Annotated[Path | None, typer.Option("--save", help="write the plan to a file")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="a saved plan instead of a configuration")] = None,
    set: Overrides = [],
) -> None:
    """Plan a run's weight sync without a GPU: from Megatron's layout into vLLM's. Ends with 1 if the plan has a fault."""
    from moerl.config.load import ConfigError
    from moerl.config.schema import TrainConfig
    from moerl.controller.preview import preview
    from moerl.reshard import explain as costs
    from moerl.reshard import store

    with user_errors():
        if (config is None) == (plan is None):
            raise ConfigError("moerl reshard takes either --config or --plan")
        if hardware not in costs.HARDWARE:
            raise ConfigError(f"--hardware {hardware}: must be one of {', '.join(costs.HARDWARE)}")
        made = store.load(plan) if plan else preview(_load(config, TrainConfig, set))
        if save:
            store.save(made, save)
        if explain:
            print(costs.report(made, hardware))
        raise typer.Exit(bool(costs.faults(made)))


@app.command()
def models(path: Annotated[Path | None, typer.Argument(help="checkpoint directory or config.json")] = None) -> None:
    """Model families; with a path, the dimensions and parameter counts of that model."""
    from moerl.models import listing

    with user_errors():
        print(listing.families() if path is None else listing.model(path))


@app.command()
def doctor() -> None:
    """Versions, hardware, and whether the parts moerl stands on are there and fit together."""
    from moerl.doctor import report

    raise typer.Exit(report())


app.command()(convert)
app.command()(audit)
app.command()(inspect)


def _load(path: Path, cls, overrides: list[str]):
    from moerl.config.load import load

    return load(path, cls, overrides)


def _report(exported: Path, output: str, columns: dict[str, str]) -> None:
    """The table of the run and where everything it wrote lies."""
    from moerl.track import display, metrics, plot

    output = Path(output)
    rows = metrics.read(output / "metrics.jsonl")
    display.table(rows, columns)
    written = {"metrics": output / "metrics.jsonl", "TensorBoard": output, "record": output / "run.json",
               "checkpoints": output / "checkpoints", "Hugging Face model": exported}
    if "reward" in rows[-1]:
        written["reward curve"] = plot.reward_curve(output / "metrics.jsonl", output / "reward.png")
    for what, path in written.items():
        print(f"{what:>20}: {path}")


if __name__ == "__main__":
    app()
