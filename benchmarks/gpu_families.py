"""Every model family under Transformer Engine on this machine's GPUs, beside transformers.

    python benchmarks/gpu_families.py OUT.json [--families llama gpt_oss] [--dtypes bfloat16 float32]

For each family a small random model with every special case of it. The reference is transformers in float32 on the same (bfloat16)
weights. The result keeps the error of Megatron's log-probs in each dtype, beside transformers' own error in that dtype, at several layouts;
whether all tensors come back bit for bit, from the ranks and from a checkpoint that they saved; loss and gradient norm of two updates. With
one GPU, or none, only the layout of one rank runs. In float32 TF32 stays as torch has it, which shows in the errors.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools.megatron_to_hf import convert
from moerl.layout import ParallelLayout
from moerl.models import params_of, read_arch
from moerl.models.tensormap import assemble, copy_again
from moerl.sample import Sample
from moerl.track.record import hardware, packages
from tests import train_jobs as jobs
from tests.models import add_prediction, tensors_of
from tests.ranks import Ranks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMMON = dict(
    vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
    max_position_embeddings=1024, initializer_range=0.06, rms_norm_eps=1e-5, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    tie_word_embeddings=False,
)
EXPERTS = dict(moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2)
LLAMA3 = dict(rope_type="llama3", rope_theta=5000.0, factor=6.0, low_freq_factor=1.0, high_freq_factor=3.0,
              original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0)
LATENT = dict(
    num_key_value_heads=8, head_dim=64, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    n_routed_experts=16, num_experts_per_tok=4, n_shared_experts=2, n_group=4, topk_group=2, first_k_dense_replace=1,
    routed_scaling_factor=2.5, moe_intermediate_size=128, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.7),
)
MODELS = {
    "llama": ("llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", dict(tie_word_embeddings=True)),
    "qwen2_moe": ("qwen2_moe", EXPERTS | dict(shared_expert_intermediate_size=192, mlp_only_layers=[1], norm_topk_prob=False, head_dim=32)),
    "qwen3_moe": ("qwen3_moe", EXPERTS | dict(norm_topk_prob=True, mlp_only_layers=[1])),
    "olmoe": ("olmoe", dict(head_dim=32, num_experts=8, num_experts_per_tok=2, intermediate_size=128, norm_topk_prob=False)),
    "mixtral": ("mixtral", dict(num_local_experts=8, num_experts_per_tok=2)),
    "deepseek_v2": ("deepseek_v2", LATENT | dict(topk_method="group_limited_greedy")),
    "deepseek_v3": ("deepseek_v3", LATENT | dict(num_nextn_predict_layers=1)),
    "moonlight": ("deepseek_v3", LATENT | dict(q_lora_rank=None, n_group=1, topk_group=1,
                                               rope_parameters=dict(rope_type="default", rope_theta=5e4))),
    "glm4_moe": ("glm4_moe", dict(moe_intermediate_size=128, n_routed_experts=8, num_experts_per_tok=4, n_group=4, topk_group=2,
                                  n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.5, attention_bias=True,
                                  use_qk_norm=True, num_nextn_predict_layers=1)),
    "minimax_m2": ("minimax_m2", dict(intermediate_size=128, num_local_experts=8, num_experts_per_tok=2, rotary_dim=32,
                                      rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))),
    "gpt_oss": ("gpt_oss", dict(intermediate_size=128, num_local_experts=8, num_experts_per_tok=2, sliding_window=40, swiglu_limit=0.5,
                                rope_parameters=YARN | dict(truncate=False))),
}


def layouts(gpus: int, moe: bool) -> dict[str, ParallelLayout]:
    """What each family runs at; experts apart where there are any."""
    found = {"1": ParallelLayout()}
    if gpus > 1:
        found |= {"tp2": ParallelLayout(tp=2), "pp2": ParallelLayout(pp=2)}
        found |= {"tp2 ep2": ParallelLayout(tp=2, ep=2), "dp2 ep2": ParallelLayout(dp=2, ep=2)} if moe else {}
    return found


def write(name: str, path: Path) -> Path:
    """A random model whose weights are bfloat16 numbers and none of which has its neutral value."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON | changes), dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key or key.endswith(("bias", "sinks")):
                tensor.add_(torch.randn_like(tensor) * (1.0 if key.endswith("sinks") else 0.1))
            if "inv_freq" not in key:
                tensor.copy_(tensor.bfloat16())
    model.save_pretrained(path)
    if changes.get("num_nextn_predict_layers"):
        add_prediction(path)
        rounded = {name: tensor.bfloat16().float() for name, tensor in load_file(path / "mtp.safetensors").items()}
        save_file(rounded, path / "mtp.safetensors")
    return path


def samples(count: int = 12) -> list[Sample]:
    """Ragged sequences, most longer than windows and unscaled contexts; weights and advantages as a policy loss takes them."""
    rng = np.random.default_rng(0)
    shape = [(int(rng.integers(4, 40)), int(rng.integers(20, 300))) for _ in range(count)]
    total = sum(r for _, r in shape)
    return [Sample(rng.integers(0, 1000, p + r), p, {"weights": np.full(r, 1 / total), "advantages": rng.normal(size=r)}) for p, r in shape]


@torch.no_grad()
def reference(path: Path, dtype: torch.dtype) -> np.ndarray:
    """transformers' log-probs of all response tokens, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").to(DEVICE).eval()
    for module in model.modules():
        if hasattr(module, "limit"):
            module.limit = model.config.swiglu_limit  # transformers before 5.19 has 7 whatever the configuration says
    out = []
    for sample in samples():
        tokens = torch.tensor(sample.tokens, device=DEVICE)
        logp = model(tokens[None]).logits[0].float().log_softmax(-1)
        out.append(logp[:-1].gather(1, tokens[1:, None])[sample.prompt - 1 :, 0].cpu().numpy())
    return np.concatenate(out)


def family_job(rank: int, layout: ParallelLayout, path: str, dtype: str, saved: str) -> dict:
    """Log-probs of the batch, this rank's shards, a checkpoint, two updates."""
    from moerl.megatron import checkpoint

    batch = samples()
    made = jobs.make(rank, layout, path, dtype=dtype, train=False)
    scored = made.logprobs([batch[:6], batch[6:]], 1.0)
    shards = [(s.name, s.tensor.float().cpu(), s.parts, s.index) for s in made.owned_shards()]
    checkpoint.save(made, saved)
    for shard in made.owned_shards():
        shard.tensor.zero_()
    checkpoint.load(made, saved)
    loaded = all(torch.equal(s.tensor.float().cpu(), old[1]) for s, old in zip(made.owned_shards(), shards))
    again = made.logprobs([batch[:6], batch[6:]], 1.0)
    repeats = all(torch.equal(a["logp"], b["logp"]) for a, b in zip(scored, again))
    del made
    made = jobs.make(rank, layout, path, dtype=dtype, lr=1e-3)
    steps = [jobs.step(made, batch, rank, layout, max_tokens=1024) | {"layout": layout} for _ in range(2)]
    logp = np.concatenate([r["logp"].float().numpy() for r in scored]) if scored else None
    return {"loaded": loaded, "repeats": repeats, "logp": logp, "shards": shards, "steps": steps}


def measure(name: str, path: Path, pool: Ranks, gpus: int, dtypes: list[str], names: list[str]) -> dict:
    arch, exact, stored = read_arch(path), reference(path, torch.float32), tensors_of(path)
    out: dict = {}
    for dtype in dtypes:
        theirs = np.abs(reference(path, getattr(torch, dtype)) - exact)
        row = out[dtype] = {"transformers": summary(theirs)}
        for label, layout in layouts(gpus if dtype == "bfloat16" else 1, arch.experts > 0).items():
            if label not in names:
                continue
            saved = path.parent / f"{path.name} {dtype} {label}"
            try:
                answers = pool.run(layout, family_job, str(path), dtype, str(saved))
            except (AssertionError, TimeoutError, EOFError, BrokenPipeError) as error:
                row[label] = {"error": str(error)[-2500:]}
                pool.close()
            else:
                back = copy_again(params_of(arch).values(), assemble(params_of(arch), [a["shards"] for a in answers]), stored)
                read = tensors_of(convert(saved, saved.with_name(saved.name + " hf"), hf=path, memory=2**31, workers=2))
                logp = answers[layout.rank_of(pp=layout.pp - 1)]["logp"]
                steps = [[s[i] for s in (a["steps"] for a in answers)] for i in range(2)]
                row[label] = summary(np.abs(logp - exact)) | {
                    "bit exact": same(back, stored), "bit exact after a restart": all(a["loaded"] for a in answers),
                    "the same log-probs after a restart": all(a["repeats"] for a in answers),
                    "bit exact from checkpoint": same(copy_again(params_of(arch).values(), read, stored), stored),
                    "loss": [jobs.total(s) for s in steps], "grad norm": [s[0]["grad_norm"] for s in steps],
                }
            print(name, dtype, label, row[label], flush=True)
    return out


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return set(ours) == set(theirs) and all(torch.equal(ours[k].float(), theirs[k].float()) for k in ours)


def summary(error: np.ndarray) -> dict:
    return {"mean": float(error.mean()), "p99": float(np.quantile(error, 0.99)), "max": float(error.max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--families", nargs="*", default=list(MODELS))
    parser.add_argument("--layouts", nargs="*", default=["1", "tp2", "pp2", "tp2 ep2", "dp2 ep2"])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    arguments = parser.parse_args()
    gpus, pool, home = min(2, torch.cuda.device_count()), Ranks(DEVICE), Path(tempfile.mkdtemp())
    results: dict = {"hardware": hardware(), "packages": packages(), "families": {}}
    for name in arguments.families:
        began = time.time()
        results["families"][name] = measure(name, write(name, home / name), pool, gpus, arguments.dtypes, arguments.layouts)
        print(name, round(time.time() - began, 1), "s", flush=True)
        arguments.out.write_text(json.dumps(results, indent=1))
    pool.close()


if __name__ == "__main__":
    main()
