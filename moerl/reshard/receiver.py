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
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.reshard.loading import Reload
from moerl.reshard.memory import Shared, opened
from moerl.reshard.move import Mover, renumbered, rounds_of, view
from moerl.reshard.names import layer_order
from moerl.reshard.offline import trace_worker
from moerl.reshard.plan import Plan
from moerl.reshard.trace import Trace
from moerl.reshard.transport import Messages

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


@dataclass(frozen=True)
class Connection:
    """How the workers of an engine take part in syncs: what the driver tells all of them.

    `plans` has each worker's rows, `traces` what the plan was made for and `shapes` the tensors of that; `shared` is the memory of ranks
    that they read themselves. `workers` are their numbers over all engines. `master` is where the processes with messages meet; None if
    there are none.
    """

    plans: tuple[Plan, ...]
    workers: tuple[int, ...]
    traces: tuple[Trace, ...]
    shapes: dict[str, tuple[int, ...]]
    shared: dict[int, Shared]
    master: str | None
    timeout_s: float
    checksums: bool


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
    def moerl_trace(self, shapes: dict[str, tuple[int, ...]], layers: int) -> Trace | str:
        """What this worker loads of the model cut to `layers` layers, whose tensors have these shapes."""
        return trace_worker(self.vllm_config, shapes, layers)

    @_returns_failure
    def moerl_connect(self, connection: Connection) -> str | None:
        """Get ready for the syncs of a plan. Waits for all ranks and workers that have messages."""
        own = connection.plans[self.rank]
        number = connection.workers[self.rank]
        ranks, rounds = len(own.place.ranks), rounds_of(own, worker=number)
        messages = None
        if connection.master:
            messages = Messages(connection.master, ranks + number, own.place, self.device, connection.timeout_s)
        names: dict[int, set[str]] = {}
        for rank, (chunk, layer, worker) in (read for step in rounds.values() for read in step.reads):
            names.setdefault(rank, set()).update(renumbered(move.param, layer) for move in chunk.moves[worker])
        mapped = {rank: opened(connection.shared[rank], params) for rank, params in names.items()}
        trace = connection.traces[self.rank]
        reload = Reload(self.get_model(), self.vllm_config, trace, own.layers.values(), connection.shapes)
        mover = Mover(rounds, messages, self.device, mapped=mapped, take=reload.take, checksums=connection.checksums)
        self.moerl_sync = reload, mover
        return None

    @_returns_failure
    def moerl_receive(self) -> dict[str, float] | str:
        """Take in one sync. After a failure the model holds a mixture of old and new weights, in a form the next sync starts from.

        Seconds of moving, bytes of the buffers of messages, and how many modules vLLM laid out anew.
        """
        reload, mover = self.moerl_sync
        with reload.reloading():
            start = time.perf_counter()
            mover.run()
            self.moerl_synchronize()
            moved = time.perf_counter() - start
        self.moerl_synchronize()
        return {"move_s": moved, "buffer_bytes": mover.nbytes, "laid_out": len(reload.counts) - len(reload.plain)}

    def moerl_synchronize(self) -> None:
        """Ranks may change their weights as soon as a sync has returned: everything must have been read."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @_returns_failure
    def moerl_load_weights(self, path: str) -> str | None:
        """Load every tensor of the safetensors file at `path`: this worker's elements of each go where its loader would put them."""
        layers = self.model_config.hf_text_config.num_hidden_layers
        shapes = {name: shape for name, (shape, _) in read_header(path).items()}
        trace = trace_worker(self.vllm_config, shapes, layers)
        places: dict[str, list] = {}
        for param, loaded in trace.params.items():
            for name, link in loaded.links:
                places.setdefault(name, []).append((param, link))
        reload = Reload(self.get_model(), self.vllm_config, trace, [(i,) for i in range(layers)], shapes)
        with reload.reloading():
            for name, tensor in self.moerl_read_weights(path):
                if name in trace.whole:
                    reload.whole[name] = tensor
                reload.take([
                    (param, link.left, link.left_strides, view(tensor.view(-1), link.right, link.sizes, link.right_strides))
                    for param, link in places.get(name, ())
                ])
        return None

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
