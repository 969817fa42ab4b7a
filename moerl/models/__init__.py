"""Model families. A family is one module with `arch(hf_config) -> Arch` and `params(arch) -> Iterator[Param]`, and `CONFIG` where vLLM
needs fields in config.json that transformers leaves out when it saves one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from moerl.models import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    llama,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    torch_dist,
)
from moerl.models.arch import Arch, ModelError
from moerl.models.checkpoint import HFReader
from moerl.models.known import problems
from moerl.models.tensormap import Param

FAMILIES = {
    "qwen3_moe": qwen3_moe, "qwen2_moe": qwen2_moe, "mixtral": mixtral, "llama": llama, "qwen2": qwen2, "qwen3": qwen3,
    "deepseek_v2": deepseek_v2, "deepseek_v3": deepseek_v3, "kimi_k2": deepseek_v3, "glm4_moe": glm4_moe, "gpt_oss": gpt_oss,
    "minimax_m2": minimax_m2, "olmoe": olmoe,
}


def read_arch(path: str | Path) -> Arch:
    """The architecture of the Hugging Face checkpoint in directory `path`, or of a configuration file.

    A checkpoint whose configuration names prediction layers may have left all their tensors out: then the model has none.
    """
    file = Path(path) if Path(path).is_file() else Path(path) / "config.json"
    if not file.is_file():
        raise ModelError(f"{path}: no Hugging Face checkpoint there (config.json is missing)")
    try:
        config = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file}: must hold fields and values")
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ModelError(f"{file}: model_type {kind!r} is not supported (supported: {', '.join(FAMILIES)}); "
                         "docs/add_a_family.md shows how to add one")
    if lines := problems(config):
        raise ModelError("\n".join(f"{file}: {line}" for line in lines))
    try:
        arch = replace(family.arch(config), context=config.get("max_position_embeddings") or 0)
    except KeyError as missing:
        raise ModelError(f"{file}: field {missing} is missing") from None
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    except (TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{file}: a field has a value that {family.__name__.rsplit('.', 1)[-1]} cannot use ({error})") from None
    return arch if arch.mtp_layers == 0 or Path(path).is_file() or _predicts(Path(path), arch) else arch.main()


def _predicts(path: Path, arch: Arch) -> bool:
    """Whether the checkpoint has any tensor of the prediction layers; where it has no tensors at all its configuration decides."""
    if torch_dist.is_torch_dist(path):
        return any(key.startswith("mtp.") for key in torch_dist.read_metadata(path))
    if not any(path.glob("*.safetensors*")):
        return True
    layers = tuple(f"model.layers.{i}." for i in range(arch.layers, arch.layers + arch.mtp_layers))
    return any(name.startswith(layers) for name in HFReader(path).files)


def params_of(arch: Arch) -> dict[str, Param]:
    """The family's tensor map by Megatron name."""
    return {p.name: p for p in FAMILIES[arch.family].params(arch)}


def config_of(arch: Arch) -> dict[str, object]:
    """Fields that an exported checkpoint's config.json has, whether or not the start's has them."""
    return getattr(FAMILIES[arch.family], "CONFIG", {})
