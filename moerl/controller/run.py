"""Start and end of a run: checks, output directory, processes, models, records. What `train` and `sft` share."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from moerl.config.load import dump
from moerl.config.schema import OptimizerConfig, RunConfig, TrainConfig
from moerl.controller import checkpoints
from moerl.controller.group import Role, WorkerGroup
from moerl.controller.placement import Cluster, Placement, check_tokenizer, max_tokens, place
from moerl.controller.sync import WeightSync
from moerl.controller.worker import ModelSpec
from moerl.models import config_of, params_of, read_arch
from moerl.models.arch import Arch, ModelError
from moerl.models.checkpoint import copy_side_files, set_config, write_hf
from moerl.models.source import Source, open_source
from moerl.models.tensormap import assemble, copy_again
from moerl.rollout.engine import unservable
from moerl.rollout.group import Rollout
from moerl.track.record import finish_run, write_run


@dataclass
class Plan:
    """All that is known before a process starts."""

    config: RunConfig
    arch: Arch
    placement: Placement
    tokenizer: object
    start: Source  # the checkpoint at model.path

    @cached_property
    def as_exported(self) -> bool:
        """Whether the start checkpoint has the form of an exported one, which is the form that an engine takes."""
        return self.start.as_exported()

    def describe(self) -> str:
        return f"{dump(self.config)}\n# placement\n{self.placement.describe()}"


def plan(config: RunConfig) -> Plan:
    """Check everything that can be checked on the driver alone: model, every layout, checkpoint tensors, tokenizer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    arch = read_arch(config.model.path)
    placement = place(config, arch)
    if placement.engines and (why := unservable(arch)):
        raise ModelError(f"{config.model.path}: {why}")
    start = open_source(config.model.path)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    check_tokenizer(tokenizer, arch, config.model.path)
    return Plan(config, arch, placement, tokenizer, start)


def prepare_output(config: RunConfig, resume: bool) -> Path | None:
    """The checkpoint to go on from (with `resume`), else an empty output directory: an earlier run in it is moved aside, not lost."""
    output = Path(config.trainer.output)
    if resume:
        found = checkpoints.latest(output / "checkpoints")
        if found is None:
            raise checkpoints.CheckpointError(f"{output}: no complete checkpoint to resume from")
        return found
    if Path(config.model.path).resolve().is_relative_to(output.resolve()):
        raise checkpoints.CheckpointError(f"model.path {config.model.path} lies in trainer.output {output}: choose another output")
    if any((output / name).exists() for name in ("metrics.jsonl", "checkpoints", "hf")):
        number = next(i for i in range(1, 10**6) if not output.with_name(f"{output.name}.{i}").exists())
        os.replace(output, output.with_name(f"{output.name}.{number}"))
        print(f"{output} holds an earlier run: moved to {output.name}.{number}")
    output.mkdir(parents=True, exist_ok=True)
    return None


class Processes:
    """The processes of a run and the models in them; the constructor returns when all is ready."""

    def __init__(self, plan: Plan):
        self.arch, self.start, self.roles = plan.arch, plan.start, {}
        self.cluster = Cluster(plan.placement, plan.config.cluster.address, plan.config.cluster.start_timeout_s)
        try:
            self._start(plan)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, plan: Plan) -> None:
        config, placement, timeout = plan.config, plan.placement, plan.config.cluster.start_timeout_s
        self.groups = [
            WorkerGroup("/".join(names), layout, [self.cluster.rank_options(r) for r in range(layout.world)], placement.device)
            for names, layout in placement.groups
        ]
        for group in self.groups:
            group.start(config.trainer.seed, timeout, config.cluster.collective_timeout_s)
        self.rollout = self._start_rollout(plan) if placement.engines else None
        for group, (names, _) in zip(self.groups, placement.groups):
            for name in names:
                self.roles[name] = Role(group, name, model_spec(config, plan.arch, name), max_tokens(config, name))
        if self.rollout:
            self.rollout.wait_ready(timeout)
            self.sync = WeightSync(config, self.roles["actor"], self.rollout, self.cluster)

    def _start_rollout(self, plan: Plan) -> Rollout:
        config: TrainConfig = plan.config
        r, tp = config.rollout, config.rollout.layout.tp
        device = self.cluster.placement.device
        options = dict(
            model=str(engine_model(plan).resolve()), empty=not plan.as_exported, tp=tp, dtype=r.dtype or config.model.dtype, device=device,
            max_model_len=config.data.max_prompt_tokens + r.sampling.max_tokens, kv_cache_gib=r.kv_cache_gib,
            gpu_memory_utilization=r.gpu_memory_utilization, enforce_eager=r.enforce_eager or device == "cpu",
            max_num_seqs=r.max_num_seqs, seed=config.trainer.seed, expert_parallel=r.layout.ep > 1, sleep=r.sleep,
            in_flight=r.sync.in_flight,
        )
        placement = self.cluster.placement
        places = [(self.cluster.engine_options(i), self.cluster.gpus(placement.engine_slots(i))) for i in range(placement.engines)]
        return Rollout(places, options)

    def trained(self) -> dict[str, Role]:
        return {name: role for name, role in self.roles.items() if name != "reference"}

    def export(self, path: Path, dtype: str) -> Path:
        """Write the actor as a Hugging Face checkpoint, with what else the start checkpoint has."""
        params, start = params_of(self.arch), self.start
        tensors = copy_again(params.values(), assemble(params, self.roles["actor"].shards()), start.copies)
        return write_hf(path, tensors | start.kept(), start.config, dtype=dtype, fields=config_of(self.arch))

    def shutdown(self) -> None:
        if getattr(self, "rollout", None):
            self.rollout.shutdown()
        self.cluster.shutdown()


def engine_model(plan: Plan) -> Path:
    """The directory an engine starts from: the start checkpoint, or, where an engine could not take exported weights in its place,
    a directory with the exported form's config and no weights. The first sync brings those."""
    path = Path(plan.config.model.path)
    if plan.as_exported:
        return path
    out = Path(plan.config.trainer.output) / "engine"
    copy_side_files(path, out)
    set_config(out, dtype=plan.config.model.dtype, **config_of(plan.arch))
    return out


def model_spec(config: RunConfig, arch: Arch, role: str) -> ModelSpec:
    if role != "actor":
        arch = arch.main()  # prediction layers are not run: only who is exported needs them
    if role == "reference":
        return ModelSpec(arch, config.model.path, config.model.dtype)
    optimizer: OptimizerConfig = getattr(config, role).optimizer
    o = optimizer.model_dump(include={"betas", "eps", "weight_decay", "clip_grad"})
    schedule = dict(
        lr=optimizer.lr, min_lr=optimizer.min_lr, kind=optimizer.schedule, warmup=optimizer.warmup_steps, total=updates(config)
    )
    router = config.actor.router.model_dump() if role == "actor" else None
    return ModelSpec(arch, config.model.path, config.model.dtype, value_head=role == "critic", optimizer=o, schedule=schedule,
                     router=router)


def updates(config: RunConfig) -> int:
    """Optimizer steps of the whole run."""
    if not isinstance(config, TrainConfig):
        return config.trainer.steps
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    return config.trainer.steps * config.algorithm.epochs * -(-samples // (config.algorithm.mini_batch or samples))


def saver(plan: Plan, processes: Processes) -> checkpoints.Saver:
    trainer = plan.config.trainer
    root = Path(trainer.output) / "checkpoints"
    return checkpoints.Saver(root, processes.trained(), plan.start, keep=trainer.keep, background=trainer.async_save)


@contextmanager
def recorded(plan: Plan, output: Path, command: list[str]):
    """`run.json` around a run: written at the start, closed with what became of it."""
    write_run(output, plan.config, command, {"trainer": plan.config.trainer.seed}, {"placement": plan.placement.describe()})
    try:
        yield
    except BaseException as error:
        finish_run(output, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed", f"{type(error).__name__}: {error}")
        raise
    finish_run(output, "finished")
