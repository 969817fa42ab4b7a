"""Reinforcement learning: the training loop and its phases, top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moerl.config.schema import TrainConfig
from moerl.controller.checkpoints import CheckpointError, Saver, latest, load, read, step_of
from moerl.controller.data import PromptStream, load_prompts
from moerl.controller.experience import Experience, pad, rows, token_mean
from moerl.controller.placement import roles_of
from moerl.controller.run import Plan, Processes, plan, prepare_output, recorded, saver
from moerl.controller.schedule import mini_batches
from moerl.models.checkpoint import fingerprint
from moerl.rewards.load import load_reward
from moerl.rewards.score import RewardError, score
from moerl.rl import ALGORITHMS
from moerl.rl.kl import kl_estimate
from moerl.rollout.engine import sample_seed
from moerl.rollout.remote import RemoteError
from moerl.sample import Sample
from moerl.track.display import Progress
from moerl.track.metrics import Metrics


@dataclass
class Ready:
    """A run that passed every check which needs no process."""

    config: TrainConfig
    plan: Plan
    reward: Callable
    stream: PromptStream
    reference: str  # fingerprint of the checkpoint that actor, critic and reference start from


def prepare(config: TrainConfig) -> Ready:
    planned = plan(config)
    reward = load_reward(config.reward.function)
    prompts = load_prompts(config.data, planned.tokenizer, config.trainer.seed)
    stream = PromptStream(prompts, config.trainer.seed, config.data.shuffle)
    return Ready(config, planned, reward, stream, fingerprint(config.model.path))


def train(config: TrainConfig, *, resume: bool = False, command: list[str] = ()) -> Path:
    """Run `config` to its last step, or go on from its last checkpoint. Returns the exported Hugging Face checkpoint."""
    ready = prepare(config)
    output = Path(config.trainer.output)
    found = prepare_output(config, resume)
    done = restore_driver(ready, found) if found else 0
    with recorded(ready.plan, output, list(command)):
        processes = Processes(ready.plan)
        try:
            if found:
                load(found, processes.trained())
            with Metrics(output, config.track.tensorboard, resume_step=done if found else None) as metrics:
                with saver(ready.plan, processes) as checkpointer:
                    loop(ready, processes, metrics, checkpointer, done)
            return processes.export(output / "hf", config.model.dtype)
        finally:
            processes.shutdown()


def loop(ready: Ready, processes: Processes, metrics: Metrics, checkpoints: Saver, done: int) -> None:
    """The steps after `done`."""
    config = ready.config
    steps, every = config.trainer.steps, config.trainer.checkpoint_every
    processes.sync(done)
    with Progress(steps, enabled=config.track.progress) as progress:
        for step in range(done + 1, steps + 1):
            position = ready.stream.state()
            progress.begin(step)
            try:
                with progress.phase("rollout"):
                    experience, texts = rollout(processes, ready, step)
                    if config.rollout.sleep:
                        processes.rollout.sleep()
                checkpoints.poll()
                with progress.phase("reward"):
                    experience, reward_metrics = reward_phase(experience, texts, ready.reward, config)
                checkpoints.poll()
                with progress.phase("scores"):
                    score_phase(experience, processes, config)
            except (RewardError, RemoteError, KeyboardInterrupt):
                # Until the update begins, what is trained is whole: keep it, with the prompts of this step unconsumed.
                _rescue(ready, checkpoints, done, position)
                raise
            with progress.phase("update"):
                updates = update(experience, processes, config, step)
            with progress.phase("sync"):
                processes.sync(step)
            done = step
            values = summary(experience) | reward_metrics | updates | timing(progress.times, experience)
            try:
                if step == steps or (every and step % every == 0):
                    with progress.phase("checkpoint"):
                        checkpoints.save(step, _driver(ready, ready.stream.state()))
            finally:
                metrics.log(step, values | checkpoints.times())  # before the manifest: what a resume goes on from has its line
            if not checkpoints.background:
                checkpoints.finish()
            progress.end(values)


def rollout(processes: Processes, ready: Ready, step: int) -> tuple[Experience, list[tuple]]:
    """Sample responses to the next prompts: experience without rewards, and (prompt, response, record) texts for the reward."""
    config, tokenizer = ready.config, ready.plan.tokenizer
    r = config.rollout
    prompts = ready.stream.next(r.prompts_per_step)
    base = sample_seed(config.trainer.seed, step)
    completions = processes.rollout.generate(
        [p.token_ids for p in prompts], seeds=[sample_seed(base, i) for i in range(len(prompts))], n=r.samples_per_prompt,
        temperature=r.sampling.temperature, max_tokens=r.sampling.max_tokens, stop_token_ids=[tokenizer.eos_token_id],
    )
    experience, texts = Experience([], [], [], [], []), []
    for group, (prompt, answers) in enumerate(zip(prompts, completions)):
        for c in answers:
            if c.version != step - 1 or c.last_version != step - 1:
                raise RemoteError(f"a response of step {step} was sampled by weights of version {c.version}, not {step - 1}")
            experience.samples.append(Sample(np.array([*prompt.token_ids, *c.token_ids]), len(prompt.token_ids)))
            experience.group.append(group)
            experience.rollout_logp.append(np.array(c.logprobs, dtype=np.float32))
            experience.truncated.append(c.finish_reason == "length")
            texts.append((prompt.text, tokenizer.decode(c.token_ids, skip_special_tokens=True), prompt.record))
    return experience, texts


def reward_phase(experience: Experience, texts: list[tuple], reward, config: TrainConfig) -> tuple[Experience, dict[str, float]]:
    """Score every response; responses whose reward failed are left out when the configuration says so."""
    scores = score(reward, *zip(*texts), on_error=config.reward.on_error)
    kept = [i for i, s in enumerate(scores.scores) if s is not None]
    if not kept:
        raise RewardError(f"the reward failed on every sample of the step; the first: {scores.errors[0]}")
    for error in scores.errors[:1]:
        print(f"{len(scores.errors)} of {len(texts)} samples left out: {error}")
    columns = (experience.samples, experience.group, experience.rollout_logp, experience.truncated, scores.scores)
    experience = Experience(*([column[i] for i in kept] for column in columns))
    extra = {f"reward/{name}": float(np.mean(values)) for name, values in scores.metrics.items()}
    return experience, extra | {"reward/skipped": float(len(scores.errors))}


def score_phase(experience: Experience, processes: Processes, config: TrainConfig) -> None:
    """Log-probabilities of the policy that sampled and of the reference, values of the critic, and the advantages from them."""
    roles, temperature = processes.roles, config.rollout.sampling.temperature
    experience.logp, experience.entropy = roles["actor"].logprobs(experience.samples, temperature)
    if "reference" in roles:
        experience.ref_logp, _ = roles["reference"].logprobs(experience.samples, temperature)
    if "critic" in roles:
        experience.values = roles["critic"].values(experience.samples)
    advantages, returns = ALGORITHMS[config.algorithm.name].advantages(experience.rollouts(), config.algorithm)
    experience.advantages = rows(advantages, experience.lengths)
    experience.returns = None if returns is None else rows(returns, experience.lengths)


def update(experience: Experience, processes: Processes, config: TrainConfig, step: int) -> dict[str, float]:
    """The optimizer steps of one training step; returns the means of their numbers."""
    a, temperature = config.algorithm, config.rollout.sampling.temperature
    count = len(experience.samples)
    logs: dict[str, list[float]] = {}
    for epoch in range(a.epochs):
        seed = sample_seed(sample_seed(config.trainer.seed, step), -1 - epoch)
        for indices in mini_batches(count, a.mini_batch or count, seed=seed):
            samples = experience.training_samples(indices, a.aggregation)
            numbers = processes.roles["actor"].update("update_actor", samples, a, temperature)
            found = {f"actor/{name}": value for name, value in numbers.items()}
            if "critic" in processes.roles:
                numbers = processes.roles["critic"].update("update_critic", samples, a)
                found |= {f"critic/{name}": value for name, value in numbers.items()}
            for name, value in found.items():
                logs.setdefault(name, []).append(value)
    means = {name: float(np.mean(values)) for name, values in logs.items()}
    means |= {f"first/{name}": logs[f"actor/{name}"][0] for name in ("ratio", "approx_kl")}
    return means | ({"value_loss": means["critic/value_loss"]} if "critic/value_loss" in means else {})


def summary(experience: Experience) -> dict[str, float]:
    """What the rollouts of the step say, before its update."""
    lengths = np.array(experience.lengths)
    logp, sampled = np.concatenate(experience.logp), np.concatenate(experience.rollout_logp)
    values = {
        "reward": float(np.mean(experience.rewards)),
        "reward/std": float(np.std(experience.rewards)),
        "entropy": token_mean(experience.entropy),
        "response_tokens": float(lengths.mean()),
        "response_tokens/max": float(lengths.max()),
        "truncated": float(np.mean(experience.truncated)),
        "mismatch/max_logp_gap": float(np.abs(logp - sampled).max()),
        "mismatch/kl": float((sampled - logp).mean()),
    }
    if experience.ref_logp is not None:
        kl = kl_estimate(pad(experience.logp), pad(experience.ref_logp), "k3")
        values["kl"] = token_mean(rows(kl, experience.lengths))
    return values


def timing(times: dict[str, float], experience: Experience) -> dict[str, float]:
    tokens = sum(len(s.tokens) for s in experience.samples)
    total = sum(times.values())
    return {f"time/{name}_s": s for name, s in times.items()} | {
        "time/step_s": total, "tokens_per_s": tokens / total, "sync_s": times["sync"], "tokens": float(tokens)
    }


def restore_driver(ready: Ready, path: Path) -> int:
    """Set the prompts to where the checkpoint left them and check that it belongs to this run. Returns its step."""
    roles = roles_of(ready.config)
    state = read(path, [name for name in roles if name != "reference"])
    if "reference" in roles and state["reference"] != ready.reference:
        raise CheckpointError(
            f"{path}: was trained against another reference than what is now in {ready.config.model.path} (its files changed)"
        )
    ready.stream.restore(state["data"])
    return state["step"]


def _driver(ready: Ready, position: dict) -> dict:
    return {"data": position, "reference": ready.reference}


def _rescue(ready: Ready, checkpoints: Saver, step: int, position: dict) -> None:
    """Save step `step` on the way out of an error, which stays the one to report: where ranks are gone, saving cannot work."""
    checkpoints.settle()
    if step > step_of(latest(checkpoints.root)):
        try:
            checkpoints.save(step, _driver(ready, position))
            checkpoints.finish()
        except RemoteError as error:
            print(f"step {step} could not be saved: {str(error).splitlines()[0]}")
