"""The configuration of a run, typed and validated. One class a group; unknown keys are refused (see load.py)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moerl.layout import ParallelLayout


class Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Layout(Group):
    """Parallel sizes of one role; `moerl.layout.ParallelLayout` holds their meaning and rules."""

    tp: int = Field(1, ge=1, description="tensor parallel")
    pp: int = Field(1, ge=1, description="pipeline parallel")
    vpp: int = Field(1, ge=1, description="virtual pipeline chunks a stage")
    ep: int = Field(1, ge=1, description="expert parallel")
    etp: int = Field(1, ge=1, description="expert tensor parallel")
    cp: int = Field(1, ge=1, description="context parallel")
    dp: int = Field(1, ge=1, description="data parallel")
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def resolve(self) -> ParallelLayout:
        return ParallelLayout(**self.model_dump())


class ModelConfig(Group):
    path: str = Field(description="Hugging Face checkpoint directory the actor, critic and reference start from")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="parameter and compute type of training")


class DataConfig(Group):
    prompts: str = Field(description="JSONL or Parquet file, or reasoning_gym:<task>")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the reasoning_gym task")
    size: int = Field(4096, ge=1, description="number of prompts drawn from a reasoning_gym task")
    prompt_column: str = "prompt"
    answer_column: str = Field("answer", description="the target text; read by supervised training only")
    system: str | None = Field(None, description="system message put before every string prompt")
    max_prompt_tokens: int = Field(1024, ge=1)
    shuffle: bool = True


class SamplingConfig(Group):
    temperature: float = Field(1.0, gt=0)
    max_tokens: int = Field(1024, ge=1, description="longest response")
    top_p: float = 1.0
    top_k: int = -1

    @model_validator(mode="after")
    def _full_distribution(self):
        # A truncated distribution is renormalised by the sampler; the trainer's log-probs are not, so ratios would be off by log(S).
        if self.top_p != 1.0 or self.top_k not in (-1, 0):
            raise ValueError("top_p and top_k must be off (1.0 and -1): the policy ratio is defined on the whole vocabulary")
        return self


class SyncConfig(Group):
    """How new weights reach the engines."""

    transport: Literal["auto", "messages"] = Field("auto", description="auto: workers read their node's ranks' memory; messages: never")
    buffer_mib: int = Field(512, ge=1, description="memory of a process for messages under way, each direction")
    in_flight: Literal["wait", "abort", "keep"] = Field("wait", description="requests that are running when new weights come")
    checksums: bool = Field(False, description="a checksum with every message")


class RolloutConfig(Group):
    layout: Layout = Layout()
    colocated: bool = Field(True, description="engines on the GPUs of training; false: on GPUs of their own")
    sleep: bool = Field(False, description="engines give their GPU memory back while training runs")
    sync: SyncConfig = SyncConfig()
    dtype: Literal["float32", "bfloat16"] | None = Field(None, description="default: model.dtype")
    prompts_per_step: int = Field(64, ge=1)
    samples_per_prompt: int = Field(1, ge=1)
    sampling: SamplingConfig = SamplingConfig()
    kv_cache_gib: float = Field(1.0, gt=0, description="KV cache of the CPU backend")
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    enforce_eager: bool = False
    max_num_seqs: int = Field(256, ge=1)

    @model_validator(mode="after")
    def _engines_of_tensor_parallel_workers(self):
        on = [k for k, v in self.layout.model_dump().items() if k not in ("tp", "ep", "dp") and v not in (1, None)]
        if on:
            raise ValueError(f"rollout.layout takes tp, ep and dp (number of engines) only, {', '.join(on)} given")
        if self.layout.ep not in (1, self.layout.tp):
            raise ValueError(f"rollout.layout: ep {self.layout.ep} must be 1 or tp {self.layout.tp}: its workers share the experts")
        if self.sleep and not self.colocated:
            raise ValueError("rollout.sleep: engines on GPUs of their own have nobody to give memory to")
        return self


class OptimizerConfig(Group):
    lr: float = Field(1e-6, gt=0)
    min_lr: float = Field(0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = Field(1.0, ge=0)


class RoleConfig(Group):
    """A model beside the actor. Without a layout of its own it shares the actor's processes."""

    layout: Layout | None = None
    max_tokens_per_rank: int | None = Field(None, ge=1, description="packed tokens of a micro-batch; default: the actor's")


class RouterConfig(Group):
    """Pre-training's pressure towards an even use of experts. Off in RL unless asked for: it pulls on the policy beside the reward."""

    aux_loss: float = Field(0.0, ge=0, description="coefficient of the load balancing loss (Switch Transformers); 0: off")
    z_loss: float = Field(0.0, ge=0, description="coefficient of the router z-loss (ST-MoE); 0: off")
    bias_update_rate: float = Field(0.0, ge=0, description="step of the routers' selection biases, where a family has them; 0: off")


class ActorConfig(Group):
    layout: Layout = Layout()
    router: RouterConfig = RouterConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    max_tokens_per_rank: int = Field(8192, ge=1, description="packed tokens of a micro-batch, never exceeded")


class CriticConfig(RoleConfig):
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)


class RewardConfig(Group):
    function: str = Field(description="reasoning_gym, package.module:function, or path/to/file.py:function")
    on_error: Literal["stop", "skip"] = "stop"


class AlgorithmConfig(Group):
    """Settings of moerl.rl; every name there reads the fields it needs."""

    name: Literal["ppo", "grpo"] = "ppo"
    epochs: int = Field(1, ge=1, description="passes over the rollouts of a step")
    mini_batch: int | None = Field(None, ge=1, description="samples an optimizer step; default: all of the step's")
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(1.0, ge=0, le=1)
    whiten: bool = True
    normalize_std: bool = True
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    value_clip: float | None = 0.2
    entropy_coef: float = 0.0
    kl_coef: float = Field(0.0, ge=0)
    kl_in: Literal["reward", "loss"] = "reward"
    kl_kind: Literal["k1", "k2", "k3"] = "k1"
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"


class TrainerConfig(Group):
    steps: int = Field(ge=1)
    output: str
    seed: int = 0
    checkpoint_every: int = Field(0, ge=0, description="0: only at the end")
    keep: int = Field(2, ge=1, description="complete checkpoints kept")
    async_save: bool = Field(True, description="train on while a checkpoint's files are written, from a copy in host memory")


class SFTTrainerConfig(TrainerConfig):
    batch_size: int = Field(128, ge=1, description="samples an optimizer step")


class ClusterConfig(Group):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus_per_node: int = Field(8, ge=1, description="for `moerl reshard`, which sees no cluster")
    address: str | None = Field(None, description="Ray address; default: $RAY_ADDRESS, else a Ray of this run's own")
    start_timeout_s: float = Field(600, gt=0, description="for processes to come up")
    collective_timeout_s: float = Field(1800, gt=0, description="longest wait of a rank for the others, a pipeline stage's included")


class TrackConfig(Group):
    tensorboard: bool = True
    progress: bool = True


class RunConfig(Group):
    model: ModelConfig
    data: DataConfig
    actor: ActorConfig = ActorConfig()
    cluster: ClusterConfig = ClusterConfig()
    track: TrackConfig = TrackConfig()


class SFTConfig(RunConfig):
    """`moerl sft`: supervised fine-tuning of the actor."""

    trainer: SFTTrainerConfig


class TrainConfig(RunConfig):
    """`moerl train`: reinforcement learning."""

    rollout: RolloutConfig = RolloutConfig()
    critic: CriticConfig = CriticConfig()
    reference: RoleConfig = RoleConfig()
    reward: RewardConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig

    @model_validator(mode="after")
    def _groups_fit_together(self):
        samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if self.algorithm.name == "grpo" and self.rollout.samples_per_prompt < 2:
            raise ValueError("rollout.samples_per_prompt must be 2 or more for grpo: an advantage is relative to its group")
        if self.algorithm.mini_batch and self.algorithm.mini_batch > samples:
            raise ValueError(
                f"algorithm.mini_batch {self.algorithm.mini_batch} exceeds the {samples} samples of a step "
                "(rollout.prompts_per_step x rollout.samples_per_prompt)"
            )
        if self.algorithm.kl_coef > 0 and self.algorithm.kl_in == "loss" and self.algorithm.kl_kind == "k1":
            raise ValueError("algorithm.kl_kind k1 has no gradient on average as a loss: with kl_in loss take k2 or k3")
        return self
