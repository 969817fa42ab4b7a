"""The other converters, run by the Python of an environment that has them; `convert.py` starts this and says when to do what.

    PYTHONPATH=. PYTHON benchmarks/convert_peers.py megatron-bridge|mbridge HF_DIR     then lines "load", "save_megatron DIR", "save_hf DIR"

Both ask for a GPU, which is stood in for where there is none; their own code that loads, converts and saves runs as it is:
- `moerl.megatron.cpu` makes CUDA mean the CPU. It rewrites arguments of every torch call, so it is switched off where that is possible
  in what is timed: always but for megatron-bridge's save of a Megatron checkpoint.
- megatron-bridge does not import without Transformer Engine, whose modules refuse to be built without a GPU: while the model is built (not
  timed), `torch.cuda.is_available` says yes. Data loaders that its save imports and does not use are empty modules where they are absent.
- mbridge also wants Transformer Engine's modules; it gets a tree of parameters with their names and shapes in a model's place.
One process, no parallelism: each holds the whole model. Seconds are of the call named, with fdatasync of what it wrote.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import time
import types
import warnings
from pathlib import Path

import torch

from moerl.megatron import cpu

ABSENT = ("megatron.energon", "nltk", "wandb", "nvidia_resiliency_ext")
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)


def start() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    cpu.install()
    properties = types.SimpleNamespace(major=9, minor=0, name="cpu", multi_processor_count=1, total_memory=2**36)
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


class _Anything(types.ModuleType):
    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes after the finders of real modules, so it only answers for what is not installed."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(ABSENT) else None

    def create_module(self, spec):
        return _Anything(spec.name)

    def exec_module(self, module):
        pass


@contextlib.contextmanager
def saying(name: str, answer):
    real = getattr(torch.cuda, name)
    setattr(torch.cuda, name, lambda *_: answer)
    yield
    setattr(torch.cuda, name, real)


@contextlib.contextmanager
def without_rewriting():
    """Torch calls as they are, not passed through the stand-in for CUDA."""
    with torch._C.DisableTorchFunction():
        yield


def bridge(hf: str):
    sys.meta_path.append(_Absent())
    import megatron.bridge.training.model_load_save  # noqa: F401
    from megatron.bridge import AutoBridge

    found = AutoBridge.from_hf_pretrained(hf)
    provider = found.to_megatron_provider(load_weights=False)
    provider.use_cpu_initialization, provider.perform_initialization = True, False
    provider.bf16, provider.params_dtype, provider.pipeline_dtype = True, torch.bfloat16, torch.bfloat16
    for fusion in ("gradient_accumulation_fusion", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion",
                   "moe_permute_fusion", "apply_rope_fusion"):
        setattr(provider, fusion, False)
    provider.finalize()
    with saying("is_available", True):
        model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True, bf16=True)
    return {
        "load": lambda: found.load_hf_weights(model),
        "save_hf": lambda path: found.save_hf_weights(model, path, show_progress=False),
        "save_megatron": lambda path: found.save_megatron_model(model, path),
    }, model


def mbridge(hf: str):
    from mbridge import AutoBridge
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(hf)
    config.rope_theta = json.loads(Path(hf, "config.json").read_text())["rope_theta"]  # transformers 5 keeps it elsewhere
    found = AutoBridge.from_config(config)
    model = [_qwen3(config)]
    return {"load": lambda: found.load_weights(model, hf), "save_hf": lambda path: found.save_weights(model, path)}, model


def _qwen3(config) -> torch.nn.Module:
    """Parameters of a Qwen3 MoE model under the names that Megatron-core gives them with Transformer Engine's modules."""
    hidden, heads, groups, size = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layer = {
        "self_attention.linear_qkv.layer_norm_weight": (hidden,), "self_attention.linear_qkv.weight": ((heads + 2 * groups) * size, hidden),
        "self_attention.q_layernorm.weight": (size,), "self_attention.k_layernorm.weight": (size,),
        "self_attention.linear_proj.weight": (hidden, heads * size), "pre_mlp_layernorm.weight": (hidden,),
        "mlp.router.weight": (config.num_experts, hidden),
    }
    for expert in range(config.num_experts):
        layer[f"mlp.experts.linear_fc1.weight{expert}"] = (2 * config.moe_intermediate_size, hidden)
        layer[f"mlp.experts.linear_fc2.weight{expert}"] = (hidden, config.moe_intermediate_size)
    root = torch.nn.Module()
    root.decoder = torch.nn.Module()
    root.decoder.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(config.num_hidden_layers))
    for number, module in enumerate(root.decoder.layers):
        module.layer_number = number + 1
        for name, shape in layer.items():
            _add(module, name, shape)
    _add(root, "embedding.word_embeddings.weight", (config.vocab_size, hidden))
    _add(root, "decoder.final_layernorm.weight", (hidden,))
    _add(root, "output_layer.weight", (config.vocab_size, hidden))
    return root


def _add(module: torch.nn.Module, name: str, shape: tuple[int, ...]) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, torch.nn.Module())
        module = getattr(module, part)
    module.register_parameter(last, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False))


def sync(path: str) -> None:
    for folder, _, files in os.walk(path):
        for file in files:
            descriptor = os.open(os.path.join(folder, file), os.O_RDONLY)
            os.fdatasync(descriptor)
            os.close(descriptor)


def peak() -> int:
    return int(next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")).split()[1]) * 1024


def main(name: str, hf: str) -> None:
    os.dup2(2, 1)  # whatever is printed there goes to the log
    start()
    if name == "megatron-bridge":
        import megatron.bridge  # noqa: F401
    calls, model = {"megatron-bridge": bridge, "mbridge": mbridge}[name](hf)
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.data.zero_()  # its memory is there before anything is timed
    from importlib.metadata import version

    packages = (name, "megatron-core", "torch", "transformers", "safetensors")
    ANSWERS.write(json.dumps({"versions": {p: version(p) for p in packages}}) + "\n")
    for line in sys.stdin:
        what, *path = line.split()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        rewriting = contextlib.nullcontext() if what == "save_megatron" else without_rewriting()
        began = time.perf_counter()
        with rewriting, torch.no_grad():
            calls[what](*path)
        for written in path:
            sync(written)
        ANSWERS.write(json.dumps({"seconds": time.perf_counter() - began, "peak": peak()}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
