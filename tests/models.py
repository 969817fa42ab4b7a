"""Small random models in Hugging Face format, made by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face checkpoint."""
    from safetensors.torch import load_file

    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def write_qwen3_moe(path: Path, seed: int = 0, **changes) -> Path:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    options = dict(
        vocab_size=131, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[1], tie_word_embeddings=False, max_position_embeddings=256, rope_theta=10000.0, initializer_range=0.1,
        router_aux_loss_coef=0.0, attention_bias=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(options | changes)))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(torch.randn_like(p) * 0.1)
    model.float().save_pretrained(path)
    return path


def write_random(path: Path, config, seed: int = 0, **save) -> Path:
    """A random float32 model of transformers' own class in which no weight has its neutral value; `save` are options of saving."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or name.endswith(("bias", "sinks")):
                tensor.add_(torch.randn_like(tensor) * (0.5 if name.endswith("sinks") else 0.1))
    model.save_pretrained(path, **save)
    if getattr(config, "num_nextn_predict_layers", 0):
        add_prediction(path)
    return path


def write_mxfp4(source: Path, path: Path, scales: tuple[int, int]) -> dict:
    """A copy of a gpt-oss checkpoint at `path` with random MXFP4 experts, exponents of their scales in the range `scales` (bias 127).

    The values of those tensors by transformers' own conversion.
    """
    import json

    import torch
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, values = load_file(source / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(*scales, blocks.shape[:3], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        values[name] = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return values


def write_deepseek(path: Path, version: int, seed: int = 0, mtp: bool = False, model_type: str | None = None, **changes) -> Path:
    """A random DeepSeek-V2 or V3 of transformers' own class; with `mtp`, a random multi-token prediction layer behind it."""
    import json

    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    options = dict(
        vocab_size=131, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
        n_routed_experts=16, num_experts_per_tok=4, n_shared_experts=2, n_group=4, topk_group=2, first_k_dense_replace=1,
        routed_scaling_factor=2.5, rms_norm_eps=1e-3, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16, beta_fast=8.0,
                             beta_slow=0.1, mscale=1.0, mscale_all_dim=0.7),
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )
    kind, config = {2: (DeepseekV2ForCausalLM, DeepseekV2Config), 3: (DeepseekV3ForCausalLM, DeepseekV3Config)}[version]
    if version == 3:
        options["num_nextn_predict_layers"] = int(mtp)
    model = kind(config(**(options | changes)))
    with torch.no_grad():
        for name, p in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name:
                p.add_(torch.randn_like(p) * 0.1)
            elif "gate." in name:  # scores and bias of the same size, so that both decide
                p.copy_(torch.randn_like(p) * 0.2)
    model.float().save_pretrained(path)
    if model_type:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": model_type}))
    if mtp:
        add_prediction(path)
    return path


def add_prediction(path: Path) -> None:
    """Give a checkpoint random prediction layers in a second file, with the model's embedding and head copied into them."""
    import torch
    from safetensors.torch import save_file

    from moerl.models import params_of, read_arch
    from moerl.models.tensormap import copy_again, hf_shapes

    main = tensors_of(path)
    (path / "mtp.safetensors").unlink(missing_ok=True)
    arch = read_arch(path / "config.json")
    params = params_of(arch).values()
    copies = [copy for param in params for copy in param.copied_as]
    tensors = {}
    for name, shape in hf_shapes(p for p in params if p.name.startswith("mtp.")).items():
        scale = 0.2 if ".gate." in name else 0.1
        tensors[name] = torch.randn(shape) * scale + (1.0 if "norm" in name else 0.0)
    again = copy_again(params, main, copies)
    save_file(tensors | {name: again[name] for name in copies if name.startswith("model.layers")}, path / "mtp.safetensors")
