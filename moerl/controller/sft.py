"""Supervised fine-tuning of the actor on prompts and answers, with the same ranks, schedule and loss contract."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moerl.config.schema import SFTConfig
from moerl.controller import checkpoints
from moerl.controller.data import PromptStream, answers, load_prompts
from moerl.controller.run import Processes, plan, prepare_output, recorded
from moerl.sample import Sample
from moerl.track.display import Progress
from moerl.track.metrics import Metrics


def sft(config: SFTConfig, *, resume: bool = False, command: list[str] = ()) -> Path:
    """Train on the answers of `config.data`. Returns the exported Hugging Face checkpoint."""
    planned = plan(config)
    prompts = load_prompts(config.data, planned.tokenizer, config.trainer.seed)
    targets = dict(zip((p.index for p in prompts), answers(prompts, config.data, planned.tokenizer)))
    stream = PromptStream(prompts, config.trainer.seed, config.data.shuffle)
    output = Path(config.trainer.output)
    found = prepare_output(output, resume)
    with recorded(planned, output, list(command)):
        return _sft(planned, config, stream, targets, output, found)


def _sft(planned, config: SFTConfig, stream: PromptStream, targets: dict[int, list[int]], output: Path, found: Path | None) -> Path:
    steps, done = config.trainer.steps, 0
    processes = Processes(planned)
    try:
        actor = processes.roles["actor"]
        if found:
            state = checkpoints.load(found, processes.trained())
            stream.restore(state["data"])
            done = state["step"]
        progress = Progress(steps, enabled=config.track.progress)
        with Metrics(output, config.track.tensorboard, resume_step=done if found else None) as metrics, progress:
            for step in range(done + 1, steps + 1):
                progress.begin(step)
                with progress.phase("update"):
                    samples = batch(stream.next(config.trainer.batch_size), targets)
                    numbers = actor.update("update_sft", samples)
                tokens = sum(len(s.tokens) for s in samples)
                values = {"loss": numbers["sft_loss"], "grad_norm": numbers["grad_norm"], "lr": numbers["lr"]}
                values |= {"tokens_per_s": tokens / progress.times["update"]}
                metrics.log(step, values)
                if step == steps or (config.trainer.checkpoint_every and step % config.trainer.checkpoint_every == 0):
                    checkpoints.save(
                        output / "checkpoints", step, processes.trained(), {"data": stream.state()}, config.trainer.keep
                    )
                progress.end(values)
        return processes.export(output / "hf", config.model.path, config.model.dtype)
    finally:
        processes.shutdown()


def batch(prompts: list, targets: dict[int, list[int]]) -> list[Sample]:
    """Prompts with their answers; every answer token of the batch weighs the same."""
    total = sum(len(targets[p.index]) for p in prompts)
    return [
        Sample(
            np.array([*p.token_ids, *targets[p.index]]), len(p.token_ids),
            {"weights": np.full(len(targets[p.index]), 1 / total, dtype=np.float32)},
        )
        for p in prompts
    ]
