"""Weight syncs on this machine's GPUs: a model of a published shape from Megatron into vLLM, colocated and asleep meanwhile, or apart.

    python benchmarks/gpu_reshard.py OUT.json [--model qwen3-30b-a3b] [--layers 6] [--syncs 5]

Uses every GPU it sees. Each case is a run's own processes: ranks with an optimizer, engines, the plan between them. The weights change
before every sync. Kept are the seconds of each sync (of the slowest engine, and as the driver sees it), GB/s of what the workers of one
GPU take in, the seconds of sleeping, and whether vLLM's parameters end bit-equal to those of an engine started from the exported
checkpoint. Beside them, from the same run: what one GPU copies within itself, and between two of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import torch

from moerl.config.schema import TrainConfig
from moerl.controller.run import Processes, plan
from moerl.reshard import explain
from moerl.sample import Sample
from moerl.track.record import hardware, packages

SHAPES = {"qwen3-30b-a3b": dict(
    model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], vocab_size=151936, hidden_size=2048, intermediate_size=6144,
    moe_intermediate_size=768, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False, max_position_embeddings=40960,
    rope_theta=1e6, rms_norm_eps=1e-6, hidden_act="silu", attention_bias=False, initializer_range=0.02,
), "moonlight-16b-a3b": dict(
    model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], vocab_size=163840, hidden_size=2048, intermediate_size=11264,
    moe_intermediate_size=1408, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, n_group=1, topk_group=1,
    first_k_dense_replace=1, moe_layer_freq=1, norm_topk_prob=True, routed_scaling_factor=2.446, scoring_func="sigmoid",
    topk_method="noaux_tc", num_nextn_predict_layers=0, tie_word_embeddings=False, max_position_embeddings=8192, rope_theta=5e4,
    rms_norm_eps=1e-6, hidden_act="silu", attention_bias=False, initializer_range=0.02,
)}


def write_model(path: Path, shape: dict, layers: int) -> Path:
    """A random checkpoint of that shape, a file a layer, with the demo's tokenizer."""
    from safetensors.torch import save_file

    from moerl import demo_model
    from moerl.models import params_of, read_arch
    from moerl.models.tensormap import hf_shapes

    demo_model.main(["--out", str(path)])
    for file in path.glob("*.safetensors"):
        file.unlink()
    (path / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": layers, "torch_dtype": "bfloat16"}))
    files: dict[str, dict] = {}
    for name, shape in hf_shapes(params_of(read_arch(path)).values()).items():
        file = name.split(".")[2] if ".layers." in name else "rest"
        tensor = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(1.0 if "norm" in name else 0.0, 0.02)
        files.setdefault(f"model-{file}.safetensors", {})[name] = tensor.cpu()
    for file, tensors in files.items():
        save_file(tensors, path / file)
    weights = {n: f.name for f in path.glob("*.safetensors") for n in _names(f)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return path


def _names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def cases(gpus: int) -> dict[str, tuple[dict, dict]]:
    """Training layout and rollout settings."""
    if gpus == 1:
        return {"1 GPU -> TP1, colocated": ({}, {"layout": {}}), "1 GPU -> TP1, colocated, asleep": ({}, {"layout": {}, "sleep": True})}
    half = {"dp": gpus // 2}
    return {
        f"TP{gpus} -> TP{gpus}, colocated": ({"tp": gpus, "ep": gpus}, {"layout": {"tp": gpus}}),
        f"EP{gpus} -> {gpus} x TP1, colocated, asleep": ({"ep": gpus, "dp": gpus}, {"layout": {"dp": gpus}, "sleep": True}),
        f"PP{gpus} -> TP{gpus}, colocated": ({"pp": gpus}, {"layout": {"tp": gpus}}),
        f"{gpus // 2} -> {gpus // 2} x TP1, apart": (half, {"layout": half, "colocated": False, "sync": {"transport": "messages"}}),
    }


def config(path: Path, output: Path, training: dict, rollout: dict) -> TrainConfig:
    return TrainConfig.model_validate({
        "model": {"path": str(path), "dtype": "bfloat16"}, "data": {"prompts": "reasoning_gym:chain_sum", "max_prompt_tokens": 64},
        "rollout": {
            "samples_per_prompt": 2, "sampling": {"max_tokens": 64}, "gpu_memory_utilization": 0.25, "enforce_eager": True
        } | rollout,
        "actor": {"layout": training, "max_tokens_per_rank": 4096, "optimizer": {"lr": 1e-3}},
        "reward": {"function": "reasoning_gym"}, "algorithm": {"name": "grpo"}, "trainer": {"steps": 1, "output": str(output)},
        "cluster": {"device": "cuda"},
    })


def run(path: Path, training: dict, rollout: dict, syncs: int, compare: bool) -> dict:
    import ray

    with tempfile.TemporaryDirectory() as scratch:
        planned = plan(config(path, Path(scratch), training, rollout))
        start = time.perf_counter()
        processes = Processes(planned)
        result = {"start_s": time.perf_counter() - start, "syncs": [], "driver_s": [], "sleep_s": []}
        try:
            made = processes.sync.plan
            costs = explain.costs(made)
            engines = list(processes.rollout.engines.values())
            for version in range(1, syncs + 1):
                _change(processes, planned.arch.vocab, version)
                if rollout.get("sleep"):
                    at = time.perf_counter()
                    processes.rollout.sleep()
                    result["sleep_s"].append(time.perf_counter() - at)
                result["driver_s"].append(processes.sync(version))
                result["syncs"].append(processes.sync.received)
            gpus = len(set(made.place.workers))
            result |= {
                "delivered_gb": costs.delivered / 1e9, "needed_gb": costs.needed / 1e9, "rounds": made.rounds,
                "gb_s_a_gpu": costs.delivered / 1e9 / gpus / min(sync["seconds"] - sync["wake_s"] for sync in result["syncs"]),
            }
            if compare:
                result |= _compare(processes, planned, Path(scratch), ray.get(engines[0].digests.remote()))
        finally:
            processes.shutdown()
    return result


def _change(processes: Processes, vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = [Sample(rng.integers(0, vocab, 30), 2, {"weights": np.full(28, 1 / 448, dtype=np.float32)}) for _ in range(16)]
    processes.roles["actor"].update("update_sft", samples)


def _compare(processes: Processes, planned, scratch: Path, digests: dict) -> dict:
    """Whether the engine's parameters, and the tokens and log-probs it samples, are those of one that loads the exported checkpoint
    itself.
    """
    import ray

    from moerl.rollout.group import EngineActor

    class Fresh(EngineActor):
        def loaded(self) -> None:
            self.engine.mark_loaded(1)

    greedy = dict(n=1, temperature=0.0, max_tokens=32, stop_token_ids=[], seeds=None)
    prompts = [[1, 2, 3, 4, 5], list(range(40))]
    sampled = ray.get(next(iter(processes.rollout.engines.values())).generate.remote(prompts, greedy))
    export = processes.export(scratch / "hf", "bfloat16")
    processes.rollout.shutdown()
    for engine in processes.rollout.engines.values():
        ray.kill(engine)
    place, gpus = processes.cluster.engine_options(0), processes.cluster.gpus(processes.cluster.placement.engine_slots(0))
    r = planned.config.rollout
    options = dict(
        model=str(export), tp=r.layout.tp, dtype="bfloat16", device="cuda", max_model_len=128, enforce_eager=True,
        gpu_memory_utilization=0.25
    )
    fresh = ray.remote(Fresh).options(num_cpus=0, **place).remote(gpus, options)
    try:
        same = ray.get(fresh.digests.remote(), timeout=300) == digests
        ray.get(fresh.loaded.remote(), timeout=10)
        again = ray.get(fresh.generate.remote(prompts, greedy), timeout=60)
        both = [[(c.token_ids, c.logprobs) for row in rows for c in row] for rows in (sampled, again)]
        return {"parameters_as_a_fresh_engine": same, "samples_as_a_fresh_engine": both[0] == both[1]}
    finally:
        ray.get(fresh.shutdown.remote(), timeout=60)


def copies() -> dict:
    """GB/s of plain copies of 2 GiB: within a GPU, and from one to another."""
    found = {}
    a = torch.empty(2**31, dtype=torch.uint8, device="cuda:0")
    for name, device in (("within", "cuda:0"), *((("between", "cuda:1"),) if torch.cuda.device_count() > 1 else ())):
        b = torch.empty_like(a, device=device)
        times = []
        for _ in range(6):
            torch.cuda.synchronize(0), torch.cuda.synchronize(device)
            start = time.perf_counter()
            b.copy_(a)
            torch.cuda.synchronize(0), torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        found[f"copy_{name}_gb_s"] = 2**31 / 1e9 / min(times)
        del b
    del a
    torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--cases", type=int, help="only the first ones")
    parser.add_argument("--syncs", type=int, default=5)
    options = parser.parse_args()
    result = {"hardware": hardware(), "packages": packages(), "model": options.model, "layers": options.layers, "cases": {}} | copies()
    with tempfile.TemporaryDirectory() as scratch:
        path = write_model(Path(scratch) / "model", SHAPES[options.model], options.layers)
        torch.cuda.empty_cache()
        for name, (training, rollout) in list(cases(torch.cuda.device_count()).items())[: options.cases]:
            start = time.perf_counter()
            try:
                result["cases"][name] = run(path, training, rollout, options.syncs, compare=True)
            except Exception as error:
                traceback.print_exc()
                result["cases"][name] = {"error": str(error).strip().splitlines()[-1]}
            result["cases"][name]["case_s"] = time.perf_counter() - start
            options.out.write_text(json.dumps(result, indent=1))
            print(name, json.dumps(result["cases"][name])[:3000], flush=True)


if __name__ == "__main__":
    main()
