"""Reinforcement learning: the training loop and its phases, top to bottom."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moerl.config.schema import TrainConfig
from moerl.controller import checkpoints
from moerl.controller.data import PromptStream, load_prompts
from moerl.controller.experience import Experience, pad, rows, token_mean
from moerl.controller.run import Plan, Processes, plan, prepare_output, recorded
from moerl.controller.schedule import mini_batches
from moerl.rewards.load import load_reward
from moerl.rewards.score import RewardError, score
from moerl.rl import ALGORITHMS
from moerl.rl.kl import kl_estimate
from moerl.rollout.engine import sample_seed
from moerl.sample import Sample
from moerl.track.display import Progress
from moerl.track.metrics import Metrics


def train(config: TrainConfig, *, resume: bool = False, command: list[str] = ()) -> Path:
    """Run `config` to its last step, or go on from its last checkpoint. Returns the exported Hugging Face checkpoint."""
    planned = plan(config)
    reward = load_reward(config.reward.function)
    prompts = load_prompts(config.data, planned.tokenizer, config.trainer.seed)
    output = Path(config.trainer.output)
    found = prepare_output(output, resume)
    with recorded(planned, output, list(command)):
        return _train(planned, config, reward, PromptStream(prompts, config.trainer.seed, config.data.shuffle), output, found)


def _train(planned: Plan, config: TrainConfig, reward, stream: PromptStream, output: Path, found: Path | None) -> Path:
    steps = config.trainer.steps
    progress = Progress(steps, enabled=config.track.progress)
    processes = Processes(planned)
    done = saved = 0
    try:
        if found:
            state = checkpoints.load(found, processes.trained())
            stream.restore(state["data"])
            done = saved = state["step"]
        with Metrics(output, config.track.tensorboard, resume_step=done if found else None) as metrics, progress:
            processes.rollout.sync(planned.arch, done, processes.roles["actor"].shard_refs())
            for step in range(done + 1, steps + 1):
                position = stream.state()
                progress.begin(step)
                with progress.phase("rollout"):
                    experience, texts = rollout(processes, planned, config, stream, step)
                try:
                    with progress.phase("reward"):
                        experience, reward_metrics = reward_phase(experience, texts, reward, config)
                except (RewardError, KeyboardInterrupt):
                    # What is trained so far is whole: keep it, and the prompts of this step stay unconsumed.
                    if done > saved:
                        _save(output, done, processes, position, config)
                    raise
                with progress.phase("scores"):
                    score_phase(experience, processes, config)
                with progress.phase("update"):
                    updates = update(experience, processes, config, step)
                with progress.phase("sync"):
                    processes.rollout.sync(planned.arch, step, processes.roles["actor"].shard_refs())
                done = step
                values = summary(experience, config) | reward_metrics | updates | timing(progress.times, experience)
                metrics.log(step, values)
                if step == steps or (config.trainer.checkpoint_every and step % config.trainer.checkpoint_every == 0):
                    with progress.phase("checkpoint"):
                        _save(output, step, processes, stream.state(), config)
                    saved = step
                progress.end(values)
        return processes.export(output / "hf", config.model.path, config.model.dtype)
    finally:
        processes.shutdown()


def rollout(processes: Processes, planned: Plan, config: TrainConfig, stream: PromptStream, step: int):
    """Sample responses to the next prompts: experience without rewards, and (prompt, response, record) texts for the reward."""
    r = config.rollout
    prompts = stream.next(r.prompts_per_step)
    base = sample_seed(config.trainer.seed, step)
    completions = processes.rollout.generate(
        [p.token_ids for p in prompts], seeds=[sample_seed(base, i) for i in range(len(prompts))], n=r.samples_per_prompt,
        temperature=r.sampling.temperature, max_tokens=r.sampling.max_tokens, stop_token_ids=[planned.tokenizer.eos_token_id],
    )
    experience, texts = Experience([], [], [], []), []
    for group, (prompt, answers) in enumerate(zip(prompts, completions)):
        for c in answers:
            experience.samples.append(Sample(np.array([*prompt.token_ids, *c.token_ids]), len(prompt.token_ids)))
            experience.group.append(group)
            experience.rollout_logp.append(np.array(c.logprobs, dtype=np.float32))
            texts.append((prompt.text, planned.tokenizer.decode(c.token_ids, skip_special_tokens=True), prompt.record))
    return experience, texts


def reward_phase(experience: Experience, texts: list[tuple], reward, config: TrainConfig) -> tuple[Experience, dict[str, float]]:
    """Score every response; responses whose reward failed are left out when the configuration says so."""
    scores = score(reward, *zip(*texts), on_error=config.reward.on_error)
    kept = [i for i, s in enumerate(scores.scores) if s is not None]
    if not kept:
        raise RewardError(f"the reward failed on every sample of the step; the first: {scores.errors[0]}")
    for error in scores.errors[:1]:
        print(f"{len(scores.errors)} of {len(texts)} samples left out: {error}")
    experience = Experience(
        [experience.samples[i] for i in kept], [experience.group[i] for i in kept], [experience.rollout_logp[i] for i in kept],
        [scores.scores[i] for i in kept],
    )
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
    # Samples of a group stay together only where all of them are there.
    whole = count == config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    group = config.rollout.samples_per_prompt if whole else 1
    logs: dict[str, list[float]] = {}
    for epoch in range(a.epochs):
        seed = sample_seed(sample_seed(config.trainer.seed, step), -1 - epoch)
        for indices in mini_batches(count, min(a.mini_batch or count, count), seed=seed, group=group):
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


def summary(experience: Experience, config: TrainConfig) -> dict[str, float]:
    """What the rollouts of the step say, before its update."""
    lengths = np.array(experience.lengths)
    logp, sampled = np.concatenate(experience.logp), np.concatenate(experience.rollout_logp)
    values = {
        "reward": float(np.mean(experience.rewards)),
        "reward/std": float(np.std(experience.rewards)),
        "entropy": token_mean(experience.entropy),
        "response_tokens": float(lengths.mean()),
        "response_tokens/max": float(lengths.max()),
        "truncated": float(np.mean(lengths >= config.rollout.sampling.max_tokens)),
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


def _save(output: Path, step: int, processes: Processes, position: dict, config: TrainConfig) -> None:
    checkpoints.save(output / "checkpoints", step, processes.trained(), {"data": position}, config.trainer.keep)
