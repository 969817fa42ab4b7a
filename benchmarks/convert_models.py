"""Checkpoints to convert: real models' tensor shapes, cut to few layers, filled with random numbers.

    python benchmarks/convert_models.py NAME DIR        NAME: qwen3-30b-a3b, deepseek-v3-bf16, deepseek-v3-fp8, or one with `-small`
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch

from moerl.models import params_of, read_arch
from moerl.models.checkpoint import INDEX, SCALE
from moerl.models.files import header
from moerl.models.tensormap import hf_shapes

SHARD = 2 * 10**9  # bytes
BLOCK = 128
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 2048, "vocab_size": 151936,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "attention_bias": False, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": None,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "router_aux_loss_coef": 0.001, "initializer_range": 0.02,
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 48, "attention_dropout": 0.0, "torch_dtype": "bfloat16",
}
# One dense layer and one of experts, 64 of its 256: a whole layer alone would be 23 GB.
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 2, "first_k_dense_replace": 1,
    "hidden_size": 7168, "vocab_size": 129280, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "moe_layer_freq": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 163840, "attention_bias": False,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
                     "mscale": 1.0, "mscale_all_dim": 1.0},
    "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}
FLOAT8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                  "weight_block_size": [BLOCK, BLOCK]}}
MODELS = {
    "qwen3-30b-a3b": QWEN3,
    "qwen3-30b-a3b-small": QWEN3 | {"vocab_size": 4096, "num_hidden_layers": 2, "num_experts": 32},
    "deepseek-v3-bf16": DEEPSEEK,
    "deepseek-v3-fp8": DEEPSEEK | FLOAT8,
    "deepseek-v3-bf16-small": DEEPSEEK | {"vocab_size": 4096, "n_routed_experts": 8},
    "deepseek-v3-fp8-small": DEEPSEEK | {"vocab_size": 4096, "n_routed_experts": 8} | FLOAT8,
}


def write(name: str, path: Path, seed: int = 1) -> Path:
    """Write model `name` into directory `path`: config.json, safetensors shards and their index."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(MODELS[name], indent=1))
    shards: list[dict] = [{}]
    size = 0
    for tensor, dtype, shape in tensors(path):
        if shards[-1] and size + prod(shape) * dtype.itemsize > SHARD:
            shards.append({})
            size = 0
        shards[-1][tensor] = (dtype, shape)
        size += prod(shape) * dtype.itemsize
    noise, weight_map = Noise(seed), {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        with open(path / file, "wb") as stream:
            stream.write(header(shard)[0])
            for dtype, shape in shard.values():
                noise.write(stream, dtype, prod(shape))
    total = sum(prod(shape) * dtype.itemsize for shard in shards for dtype, shape in shard.values())
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return path


def tensors(path: Path) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of every tensor, as the model's own checkpoint has them."""
    quantized = "quantization_config" in json.loads((path / "config.json").read_text())
    for name, shape in hf_shapes(params_of(read_arch(path)).values()).items():
        if quantized and name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            yield name, torch.float8_e4m3fn, shape
            yield name + SCALE, torch.float32, tuple(-(-n // BLOCK) for n in shape)
        else:
            yield name, torch.float32 if name.endswith("correction_bias") else torch.bfloat16, shape


class Noise:
    """Normal numbers, taken from random places of a pool: fast to make, and no two tensors are alike."""

    def __init__(self, seed: int):
        self.random = torch.Generator().manual_seed(seed)
        values = torch.randn(2**25, generator=self.random)
        self.pool = {
            torch.bfloat16: (values * 0.02).bfloat16(), torch.float8_e4m3fn: (values * 100).clamp_(-448, 448).to(torch.float8_e4m3fn),
            torch.float32: values.abs_() * 1e-4 + 1e-5,
        }

    def write(self, stream, dtype: torch.dtype, count: int) -> None:
        pool = self.pool[dtype]
        while count:
            n = min(count, 2**22)
            first = int(torch.randint(0, len(pool) - n + 1, (1,), generator=self.random))
            stream.write(pool[first : first + n].view(torch.uint8).numpy().data)
            count -= n


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("path", type=Path)
    given = parser.parse_args()
    write(given.name, given.path)
