"""The receiving end of a weight sync, inside a vLLM worker.

vLLM mixes `WeightReceiver` into its worker class (`worker_extension_cls`); its methods are then called by name on
every worker of an engine. None of them raises: `collective_rpc` stops reading answers at the first worker that did, and
the next call would take the answers left over for its own. A failure is returned instead, as its message.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.reshard.gpt_oss import fill

if TYPE_CHECKING:
    import torch

Header = dict[str, tuple[tuple[int, ...], str]]  # tensor name -> shape, safetensors dtype

logger = logging.getLogger("vllm.moerl")  # below vLLM's logger: its level, its handlers

FLOAT_DTYPES = {"F32", "F16", "BF16"}
_PROBE_ROWS = 1024  # rows of the identity matrix sent through a CPU linear layer at a time


def read_header(path: str | Path) -> Header:
    """Shape and dtype of every tensor in a safetensors file, from its header alone."""
    with open(path, "rb") as file:
        entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in entries.items() if name != "__metadata__"}


def checkpoint_header(model: str) -> Header:
    """Shape and dtype of every tensor of a Hugging Face checkpoint directory (one file or an indexed set), stored frequencies left out.

    Raises ValueError when the directory holds no safetensors file.
    """
    from moerl.models.checkpoint import FREQUENCIES

    directory = Path(model)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model} holds no .safetensors file, so the names and shapes it needs are unknown")
    entries = {name: entry for file in files for name, entry in read_header(file).items()}
    return {name: entry for name, entry in entries.items() if not name.endswith(FREQUENCIES)}


def check_header(needed: Header, given: Header) -> None:
    """Raise ValueError, naming the tensors, unless `given` has exactly the names and shapes of `needed`.

    A dtype may differ when it is an unquantised float one (vLLM casts while it copies); any other must match.
    """
    shared = [name for name in needed if name in given]
    problems = {
        "missing": [name for name in needed if name not in given],
        "not in the model": [name for name in given if name not in needed],
        "mis-shaped": [
            f"{name} {list(given[name][0])}, must be {list(needed[name][0])}"
            for name in shared
            if given[name][0] != needed[name][0]
        ],
        "of the wrong dtype": [
            f"{name} {given[name][1]}, must be {needed[name][1]}"
            for name in shared
            if given[name][1] != needed[name][1] and not {given[name][1], needed[name][1]} <= FLOAT_DTYPES
        ],
    }
    found = [f"{len(names)} {kind} ({_first(names)})" for kind, names in problems.items() if names]
    if found:
        raise ValueError("weights do not fit the model: tensors " + "; ".join(found))


def layer_order(name: str) -> list[tuple[int, int | str]]:
    """Sort key that keeps a layer's tensors together and layer 2 before layer 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


def _first(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def _returns_failure(method: Callable) -> Callable:
    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:  # noqa: BLE001  whatever vLLM raises must reach the caller
            logger.exception("%s failed", method.__name__)
            return f"{type(error).__name__}: {error}"

    return call


class WeightReceiver:
    """Methods a vLLM worker gains to take in new weights. Where one fails, its answer is a str: the message."""

    def moerl_check_weights(self, path: str, needed: Header) -> str | None:
        """Compare the names, shapes and dtypes of the file at `path` with the needed ones. Touches no weight."""
        try:
            check_header(needed, read_header(path))
        except (OSError, ValueError) as error:
            return str(error)
        return None

    @_returns_failure
    def moerl_load_weights(self, path: str) -> str | None:
        """Load every tensor of the safetensors file at `path` through one layerwise reload.

        vLLM's loaders cut the tensors to this worker's shard and cast them to the model's dtype. After a failure the
        model holds a mixture of old and new weights, yet in the form a further load starts from.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        from vllm.platforms import current_platform

        model = self.get_model()
        own = {name for name, _ in model.named_parameters()}
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - own
        if current_platform.is_cpu():
            _forget_moe_kernels(model)
        _name_loaders(model)
        try:
            with set_current_vllm_config(self.vllm_config), _quiet_reload():
                initialize_layerwise_reload(model)
                needed = {name for name, _ in model.named_parameters()} - tied  # now without what vLLM derives
                weights = self.moerl_read_weights(path)
                model.load_weights(fill(model, weights) if type(model).__name__ == "GptOssForCausalLM" else weights)
                unreached = _untouched(model, needed)
                finalize_layerwise_reload(model, self.model_config)
                if current_platform.is_cpu():
                    _repack_kept_weights(model)
        except Exception:
            _leave_reload(model)
            raise
        if self.model_config.quantization is None and unreached:
            raise RuntimeError(f"no tensor reached the parameters {_first(sorted(unreached))}")

    def moerl_read_weights(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the file's tensors layer by layer, so that vLLM finishes (and frees) one layer before the next."""
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys(), key=layer_order):
                yield name, file.get_tensor(name)

    @_returns_failure
    def moerl_parameter_digests(self) -> dict[str, str] | str:
        """SHA-256 of every weight this worker computes with, by parameter name.

        Covers the bytes of each parameter and each persistent buffer as stored, which on the CPU means expert weights
        in their packed order. vLLM's CPU linear layers compute from a copy inside an opaque kernel, and most of them
        empty the parameter (those are left out); the kernel's copy is hashed as `<name>@kernel`, by way of its product
        with the identity matrix: each output is one weight times one plus zeros, hence the exact transposed weight.
        Not covered: derived tables that no checkpoint fills (rotary cosines).
        """
        import torch

        model = self.get_model()
        tensors = model.state_dict(keep_vars=True).items()
        digests = {name: _digest([tensor]) for name, tensor in tensors if tensor.numel()}
        with torch.inference_mode():
            for name, module in model.named_modules():
                if hasattr(module, "cpu_linear"):
                    digests[f"{name}.weight@kernel"] = _digest(_kernel_weight(module))
        return digests


def _forget_moe_kernels(model: torch.nn.Module) -> None:
    """Make every MoE layer build its kernel anew when its weights have arrived.

    On the CPU vLLM packs expert weights only while it first builds that kernel: with a kernel in place a reload would
    leave unpacked weights where packed ones are read.
    """
    for module in model.modules():
        quant_method = getattr(module, "quant_method", None)
        if getattr(quant_method, "moe_kernel", None) is not None:
            quant_method.moe_kernel = None


def _name_loaders(model: torch.nn.Module) -> None:
    """Give every loader a name, which the reload asks for and a partial function has none of (MiniMax-M2's norms)."""
    for param in model.parameters():
        loader = getattr(param, "weight_loader", None)
        if isinstance(loader, functools.partial):
            loader.__name__ = loader.func.__name__


def _repack_kept_weights(model: torch.nn.Module) -> None:
    """Pack anew the weight of each CPU linear layer that keeps it: the output layer.

    Where that is tied to the embedding, no tensor of its own arrives and its kernel would go on with the old weight.
    """
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def _untouched(model: torch.nn.Module, names: set[str]) -> list[str]:
    """Those of the parameters `names` whose module is in the middle of a reload and has not received a single element.

    What `load_weights` returns does not tell: vLLM 0.26 leaves fused experts out of it during a reload, and a model that copies past
    the parameters' loaders names what the reload will not take over. Parameters that are not emptied are written in place.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    waiting = set()
    for prefix, module in model.named_modules():
        info = layerwise.get_layerwise_info(module)
        if info.can_load() and info.load_numel <= 0:
            waiting |= {f"{prefix}.{name}" if prefix else name for name, p in module.named_parameters(recurse=False) if p.is_meta}
    return sorted(names & waiting)


@contextmanager
def _quiet_reload() -> Iterator[None]:
    """Drop vLLM's warning about every module without a checkpoint tensor (each rotary table, at each sync).

    Parameters that no tensor reached are found by `_untouched`.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    level = layerwise.logger.level
    layerwise.logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        layerwise.logger.setLevel(level)


def _leave_reload(model: torch.nn.Module) -> None:
    """Undo an unfinished layerwise reload: stored tensors back in place, counters at zero.

    vLLM has no such call; without it the next reload would go on counting from where this one stopped.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for module in model.modules():
        info = layerwise.get_layerwise_info(module)
        if info.can_load():
            layerwise._place_kernel_tensors(module, info)
        info.reset()


def _kernel_weight(module: Any) -> Iterator[torch.Tensor]:
    """The transposed weight [in, out] that a CPU linear layer's kernel holds, `_PROBE_ROWS` rows at a time."""
    import torch

    if module.weight.numel():
        width = module.weight.shape[1]
    else:
        width = getattr(module, "input_size_per_partition", None) or module.input_size
    for start in range(0, width, _PROBE_ROWS):
        rows = torch.arange(start, min(start + _PROBE_ROWS, width))
        probe = torch.zeros(len(rows), width, dtype=module.weight.dtype)
        probe[torch.arange(len(rows)), rows] = 1
        yield module.cpu_linear(probe, module.weight, None)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).cpu().numpy())
    return digest.hexdigest()
