"""What Megatron exports, vLLM serves: the engine's log-probabilities are Megatron's, at the start and after a sync, for every family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from moerl import demo_model
from moerl.controller.run import Processes, plan
from moerl.models import FAMILIES, config_of, params_of, read_arch
from moerl.models.checkpoint import HFReader, copy_side_files, set_config, write_hf
from moerl.models.tensormap import assemble, copy_again, hf_shapes
from moerl.rollout.remote import RemoteError
from moerl.sample import Sample
from tests import train_jobs as jobs
from tests.models import write_deepseek, write_mxfp4, write_random
from tests.rollout_helpers import PROMPTS, SAMPLING, start_engine
from tests.test_families_deepseek import write_float8
from tests.test_families_dense import COMMON, TINY
from tests.test_families_glm import WRITERS
from tests.test_families_olmoe import TINY as OLMOE
from tests.test_parity import LAYOUTS
from tests.test_sync import assert_same_logprobs
from tests.test_sync import config as run_config

# Contexts are 64 tokens long before scaling, one prompt is longer. vLLM's CPU kernels ask for heads of 32 elements, or latents of 512.
HEAD = 32
DENSE = dict(head_dim=HEAD, hidden_size=4 * HEAD)  # Qwen2's heads are what divides the hidden size
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, beta_slow=0.1)
LATENT = dict(
    kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32, num_hidden_layers=2, max_position_embeddings=256,
    rms_norm_eps=1e-6,  # vLLM has it in the norms of the latents, too, where transformers always has this value
    rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.7),
)
DEEPSEEK = {
    "deepseek_v2": dict(version=2, topk_method="group_limited_greedy"),
    "deepseek_v3": dict(version=3, mtp=True),
    "kimi_k2": dict(version=3, model_type="kimi_k2", n_group=1, topk_group=1, n_shared_experts=1),
}
WORKERS = {"minimax_m2": 2, "gpt_oss": 2}  # tensor-parallel engine workers, else one


def write(path: Path, family: str, seed: int, **save) -> Path:
    """A tiny random checkpoint that vLLM's CPU kernels can serve; `save` are options of transformers' saving."""
    from transformers import AutoConfig

    if family in DEEPSEEK:
        return write_deepseek(path, seed=seed, **DEEPSEEK[family] | LATENT)
    if family in TINY:
        return write_random(path, AutoConfig.for_model(family, **COMMON | TINY[family] | DENSE), seed, **save)
    if family == "olmoe":
        return write_random(path, AutoConfig.for_model(**OLMOE | dict(hidden_size=4 * HEAD, intermediate_size=32)), seed)
    config = WRITERS[family]()
    config.head_dim = HEAD
    if family == "gpt_oss":
        config.rope_parameters["original_max_position_embeddings"] = 64
        config.intermediate_size = 64  # 32 a worker
        config.swiglu_limit = 7.0  # the only one that vLLM has
    return write_random(path, config, seed)


def shards_job(rank, layout, paths):
    """The shards of several checkpoints of one model, loaded one after another."""
    made = jobs.make(rank, layout, paths[0], train=False)
    found = []
    for path in paths:
        made.load_weights(path)
        found.append([(s.name, s.tensor.clone(), s.parts, s.index) for s in made.owned_shards()])
    return found


def logprobs_job(rank, layout, paths, batches, temperature):
    """Log-probs of the response tokens of one batch a checkpoint."""
    made = jobs.make(rank, layout, paths[0], train=False)
    found = []
    for path, batch in zip(paths, batches):
        made.load_weights(path)
        (result,) = made.logprobs([batch], temperature)
        found.append(np.split(result["logp"].numpy(), np.cumsum(result["responses"])[:-1]))
    return found


def sampled(engine) -> list[tuple[Sample, list[float]]]:
    """Samples of every prompt with the engine's log-probs of the sampled tokens."""
    answers = engine.generate(PROMPTS, **SAMPLING)
    return [(Sample(np.array([*p, *c.token_ids]), len(p)), c.logprobs) for p, row in zip(PROMPTS, answers) for c in row]


def assert_megatrons(ranks, layout, paths, served) -> None:
    """The engine's log-probs in `served`, one list of samples a checkpoint, are those of Megatron with that checkpoint's weights."""
    batches = [[sample for sample, _ in rows] for rows in served]
    found = ranks.run(layout, logprobs_job, list(map(str, paths)), batches, SAMPLING["temperature"])[0]
    for ours, rows in zip(found, served):
        for logp, (_, theirs) in zip(ours, rows, strict=True):
            np.testing.assert_allclose(theirs, logp, rtol=0, atol=2e-3)


def of_main(arch, tensors: dict) -> dict:
    """What a sync brings: prediction layers stay with the actor."""
    return {name: tensors[name] for name in hf_shapes(params_of(arch.main()).values())}


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_serves_the_export_and_the_next_sync(ranks, tmp_path, monkeypatch, family):
    from transformers import DeepseekV3Config

    # vLLM serves kimi_k2 as a DeepseekV3Config and renames that class for good, whose weights transformers then reads and writes otherwise.
    monkeypatch.setattr(DeepseekV3Config, "model_type", DeepseekV3Config.model_type)
    paths = [write(tmp_path / str(seed), family, seed) for seed in (1, 2)]
    arch = read_arch(paths[0])
    layout = LAYOUTS["tp2 ep2" if arch.experts else "tp2"]
    answers = ranks.run(layout, shards_job, list(map(str, paths)))
    old, new = (assemble(params_of(arch), [answer[i] for answer in answers]) for i in range(2))
    old = copy_again(params_of(arch).values(), old, HFReader(paths[0]).files)
    export = write_hf(tmp_path / "export", old, paths[0], dtype="float32", fields=config_of(arch))
    engine = start_engine(export, tp=WORKERS.get(family, 1))
    try:
        if family == "minimax_m2":  # vLLM 0.32 on the CPU: "assert self.scoring_func == 'softmax'" in its router
            engine._call(RuntimeError, "group_experts")
        engine.mark_loaded(1)
        served = [sampled(engine)]
        engine.load_weights(of_main(arch, new), 2)
        served.append(sampled(engine))
    finally:
        engine.shutdown()
    assert_megatrons(ranks, layout, paths, served)


def float8_deepseek(path: Path) -> Path:
    write_float8(write(path / "plain", "deepseek_v3", 1), path / "start")
    return path / "start"


def mxfp4_gpt_oss(path: Path) -> Path:
    write_mxfp4(write(path / "plain", "gpt_oss", 1), path / "start", scales=(117, 123))
    return path / "start"


@pytest.mark.parametrize("make", [float8_deepseek, mxfp4_gpt_oss])
def test_a_start_in_another_form_serves_after_its_first_sync(ranks, tmp_path, make):
    """vLLM takes no plain weights in place of quantised ones: it starts with none."""
    start = make(tmp_path)
    arch, layout, out = read_arch(start), LAYOUTS["tp2 ep2"], tmp_path / "engine"
    assert not HFReader(start).as_exported(params_of(arch), config_of(arch))
    answers = ranks.run(layout, shards_job, [str(start)])
    copy_side_files(start, out)
    set_config(out, dtype="float32", **config_of(arch))
    engine = start_engine(out, tp=1, empty=True)
    try:
        for refused in (lambda: engine.mark_loaded(0), lambda: sampled(engine)):
            with pytest.raises(RuntimeError, match="started without weights"):
                refused()
        engine.load_weights(of_main(arch, assemble(params_of(arch), [answer[0] for answer in answers])), 0)
        served = [sampled(engine)]
    finally:
        engine.shutdown()
    assert_megatrons(ranks, layout, [start], served)


def test_a_run_starts_from_fused_experts(tmp_path):
    """vLLM cannot load Mixtral's experts as transformers fuses them; the run's engine starts without weights and gets them by the sync."""
    from transformers import AutoConfig, AutoTokenizer

    demo_model.main(["--out", str(tmp_path / "tokenizer")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    config = AutoConfig.for_model("mixtral", **COMMON | TINY["mixtral"] | DENSE | {"vocab_size": len(tokenizer) + 3})
    start = write_random(tmp_path / "start", config, save_original_format=False)
    tokenizer.save_pretrained(start)
    planned = plan(run_config(start, tmp_path / "run"))
    processes = Processes(planned)
    try:
        assert {"config.json", "tokenizer.json"} <= {f.name for f in (tmp_path / "run" / "engine").iterdir()}
        assert not list((tmp_path / "run" / "engine").glob("*.safetensors"))
        with pytest.raises(RemoteError, match="started without weights"):
            processes.rollout.generate(PROMPTS, **SAMPLING)
        processes.sync(0)
        assert_same_logprobs(processes, processes.roles["actor"])
        export = processes.export(tmp_path / "export", "float32")
    finally:
        processes.shutdown()
    assert HFReader(export).as_exported(params_of(planned.arch), {}) and not planned.as_exported
