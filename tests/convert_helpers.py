"""Models to convert, and how their conversions are compared."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from moerl.cli import app
from tests.models import write_deepseek, write_qwen3_moe, write_random
from tests.test_families_dense import tiny
from tests.test_families_glm import WRITERS

BUDGET = dict(memory=2**30, workers=2)
SUBSTITUTES = {"tokenizer.json": "{}", "chat_template.jinja": "{{ x }}", "generation_config.json": "{}", "modeling_own.py": "x = 1\n"}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


def digests(path: Path) -> dict[str, str]:
    return {str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(path.rglob("*")) if f.is_file()}


def write_model(path: Path, kind: str) -> Path:
    """A random model of a family, in the hub's spelling, with files beside it."""
    if kind == "deepseek_v3":
        write_deepseek(path, 3, mtp=True)
    elif kind == "qwen3_moe":
        write_qwen3_moe(path)
    elif kind in WRITERS:
        write_random(path, WRITERS[kind]())
    else:
        tiny(kind).save_pretrained(path)
    for name, text in SUBSTITUTES.items():
        (path / name).write_text(text)
    return path


def big(path: Path, layers: int = 8) -> Path:
    """A llama of some 250 MB with distinct random numbers, in two files."""
    write_random(path, _llama(layers))
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    (path / "model.safetensors").unlink()
    for i in range(2):
        save_file({n: tensors[n].bfloat16() for n in names[i::2]}, path / f"model-{i}.safetensors")
    return path


def _llama(layers: int):
    from transformers import LlamaConfig

    return LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=4,
                       vocab_size=20000, tie_word_embeddings=False)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "checkpoint_tools.hf_to_megatron", *arguments]


def run(*arguments) -> tuple[int, str]:
    answer = CliRunner().invoke(app, list(map(str, arguments)))
    return answer.exit_code, answer.stdout + answer.stderr


def save(out: Path, like: Path, tensors: dict[str, torch.Tensor]) -> Path:
    out.mkdir()
    (out / "config.json").write_bytes((like / "config.json").read_bytes())
    save_file(tensors, out / "model.safetensors")
    return out
