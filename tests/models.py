"""Small random models in Hugging Face format, made by transformers itself."""

from __future__ import annotations

from pathlib import Path


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
