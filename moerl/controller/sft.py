"""Supervised fine-tuning of the actor on prompts and answers, with the same ranks, schedule and loss contract."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moerl.config.schema import SFTConfig
from moerl.controller.checkpoints import Saver, load, read
from moerl.controller.data import DataError, PromptStream, answers, load_prompts
from moerl.controller.run import Processes, plan, prepare_output, recorded, saver
from moerl.sample import Sample
from moerl.track.display import Progress
from moerl.track.metrics import Metrics


def sft(config: SFTConfig, *, resume: bool = False, command: list[str] = ()) -> Path:
    """Train on the answers of `config.data`. Returns the exported Hugging Face checkpoint."""
    planned = plan(config)
    prompts = load_prompts(config.data, planned.tokenizer, config.trainer.seed)
    targets = dict(zip((p.index for p in prompts), answers(prompts, config.data, planned.tokenizer)))
    check_lengths(prompts, targets, config)
    stream = PromptStream(prompts, config.trainer.seed, config.data.shuffle)
    output = Path(config.trainer.output)
    found, done = prepare_output(config, resume), 0
    if found:
        state = read(found, ["actor"])
        stream.restore(state["data"])
        done = state["step"]
    with recorded(planned, output, list(command)):
        processes = Processes(planned)
        try:
            if found:
                load(found, processes.trained())
            with Metrics(output, config.track.tensorboard, resume_step=done if found else None) as metrics:
                with saver(planned, processes) as checkpointer:
                    loop(config, processes, stream, targets, metrics, checkpointer, done)
            return processes.export(output / "hf", config.model.dtype)
        finally:
            processes.shutdown()


def loop(config: SFTConfig, processes: Processes, stream: PromptStream, targets: dict, metrics: Metrics, checkpoints: Saver,
         done: int) -> None:
    """The steps after `done`."""
    actor, steps, every = processes.roles["actor"], config.trainer.steps, config.trainer.checkpoint_every
    with Progress(steps, enabled=config.track.progress) as progress:
        for step in range(done + 1, steps + 1):
            progress.begin(step)
            with progress.phase("update"):
                samples = batch(stream.next(config.trainer.batch_size), targets)
                numbers = actor.update("update_sft", samples)
            tokens = sum(len(s.tokens) for s in samples)
            values = {"loss": numbers["sft_loss"], "grad_norm": numbers["grad_norm"], "lr": numbers["lr"]}
            values |= {"tokens_per_s": tokens / progress.times["update"]}
            checkpoints.poll()
            try:
                if step == steps or (every and step % every == 0):
                    with progress.phase("checkpoint"):
                        checkpoints.save(step, {"data": stream.state()})
            finally:
                metrics.log(step, values | checkpoints.times())  # before the manifest: what a resume goes on from has its line
            if not checkpoints.background:
                checkpoints.finish()
            progress.end(values)


def check_lengths(prompts: list, targets: dict[int, list[int]], config: SFTConfig) -> None:
    """Every sample must fit a micro-batch; refused before anything starts, naming the row."""
    tp, cap = config.actor.layout.tp, config.actor.max_tokens_per_rank
    for p in prompts:
        length = len(p.token_ids) + len(targets[p.index])
        if length > cap // tp * tp:
            raise DataError(
                f"row {p.index} of {config.data.prompts} has {length} tokens with its answer, above actor.max_tokens_per_rank {cap}"
            )


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
