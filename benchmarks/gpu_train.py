"""The whole stack on this machine's GPUs: supervised steps, PPO and GRPO at several layouts, in bfloat16.

    python benchmarks/gpu_train.py OUT.json [--steps 4]

Uses every GPU it sees (one is enough). Each case is a real run of the command's own code. The result keeps, for each, the gap between
vLLM's and Megatron's log-probs after each sync, the first step's ratio and KL, and the seconds of each phase, beside versions and hardware.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from pathlib import Path

import torch

from moerl.config.schema import SFTConfig, TrainConfig
from moerl.controller.sft import sft
from moerl.controller.train import train
from moerl.track.metrics import read
from moerl.track.record import hardware, packages

DATA = {
    "prompts": "reasoning_gym:chain_sum", "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "size": 2048, "max_prompt_tokens": 64,
}
KEPT = ("reward", "kl", "entropy", "mismatch/", "first/", "time/", "sync_s", "tokens_per_s", "actor/grad_norm", "value_loss", "loss")


def layouts(gpus: int) -> dict[str, tuple[dict, dict]]:
    """Training layout and rollout layout of each case."""
    if gpus == 1:
        return {"1 GPU": ({}, {})}
    return {
        "TP2 EP2 -> TP2": ({"tp": 2, "ep": 2}, {"tp": 2}),
        "EP2 DP2 -> 2 x TP1": ({"dp": 2, "ep": 2}, {"dp": 2}),
        "PP2 -> TP2": ({"pp": 2}, {"tp": 2}),
    }


def common(path: str, output: Path, steps: int) -> dict:
    return {
        "model": {"path": path, "dtype": "bfloat16"}, "data": DATA, "cluster": {"device": "cuda"},
        "track": {"tensorboard": False, "progress": False}, "trainer": {"steps": steps, "output": str(output), "seed": 1},
    }


def sft_config(path: str, output: Path, layout: dict, steps: int) -> SFTConfig:
    actor = {"layout": layout, "max_tokens_per_rank": 8192, "optimizer": {"lr": 2e-3}}
    return SFTConfig.model_validate(common(path, output, steps) | {"actor": actor})


def rl_config(path: str, output: Path, training: dict, rollout: dict, steps: int, algorithm: str) -> TrainConfig:
    config = common(path, output, steps) | {
        "actor": {"layout": training, "max_tokens_per_rank": 8192, "optimizer": {"lr": 3e-4}},
        "critic": {"optimizer": {"lr": 1e-3}},
        "rollout": {
            "layout": rollout, "prompts_per_step": 128, "samples_per_prompt": 2, "sampling": {"max_tokens": 12},
            "gpu_memory_utilization": 0.3, "enforce_eager": True,
        },
        "reward": {"function": "reasoning_gym"},
        "algorithm": {"name": algorithm, "kl_coef": 0.01, "mini_batch": 128},
    }
    return TrainConfig.model_validate(config)


def case(name: str, results: dict, run, output: Path) -> None:
    """Run one case; a failure is a result too, and the next case still runs."""
    began = time.time()
    try:
        run()
        rows = [{k: v for k, v in row.items() if k == "step" or k.startswith(KEPT)} for row in read(output / "metrics.jsonl")]
        results[name] = {"seconds": round(time.time() - began, 1), "steps": rows}
    except BaseException as error:
        results[name] = {"seconds": round(time.time() - began, 1), "error": f"{type(error).__name__}: {error}"[-3000:]}
        traceback.print_exc()
    print(name, "failed" if "error" in results[name] else "done", results[name]["seconds"], "s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    from moerl import demo_model

    work = Path(tempfile.mkdtemp())
    demo_model.main(["--out", str(work / "start")])
    results: dict = {"hardware": hardware(), "packages": packages(), "cases": {}}
    cases, start = results["cases"], str(work / "start")
    for i, (name, (training, rollout)) in enumerate(layouts(torch.cuda.device_count()).items()):
        if i == 0:
            config = sft_config(start, work / "sft", training, 50)
            case(f"SFT {name}", cases, lambda c=config: sft(c), work / "sft")
            start = str(work / "sft" / "hf") if (work / "sft" / "hf").is_dir() else start
        algorithm = "grpo" if i == 1 else "ppo"
        output = work / f"rl{i}"
        config = rl_config(start, output, training, rollout, arguments.steps, algorithm)
        case(f"{algorithm.upper()} {name}", cases, lambda c=config: train(c), output)
        arguments.out.write_text(json.dumps(results, indent=1))
    arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
