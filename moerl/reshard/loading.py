"""Elements into a running vLLM model: one layerwise reload around a whole sync.

vLLM's kernels read weights in layouts of their own. Its reload puts every module back into the form in which a checkpoint is loaded; each
is filled here, straight to where its loader would put the elements, and handed to vLLM to be laid out anew as soon as it is complete.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from moerl.reshard.links import covered
from moerl.reshard.move import Arrived
from moerl.reshard.names import LAYER, layer_order, renumbered
from moerl.reshard.plan import WHOLE
from moerl.reshard.trace import Trace

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Reload:
    """Fills a model that runs.

    `trace` is what this worker loads of the example layers; `layers` are the numbers of the layers of each kind, the example first.
    `shapes` are those of the example layers' tensors.
    """

    def __init__(
        self, model: torch.nn.Module, config: VllmConfig, trace: Trace, layers: Iterable[tuple[int, ...]],
        shapes: Mapping[str, tuple[int, ...]],
    ):
        self.model, self.config, self.trace, self.shapes = model, config, trace, shapes
        self.like = {number: same[0] for same in layers for number in same}
        self.counts: dict[str, int] = {}  # elements that each module gets
        self.partial: dict[str, list[str]] = {}  # its parameters that no tensor fills wholly
        self.left: dict[str, int] = {}
        self.plain: frozenset[str] = frozenset()  # modules that kernels read in the form they are loaded in
        self.learned: set[str] = set()  # those found so
        self.rest: list[str] = []  # modules without weights to load, found in the first sync
        self.ready: dict[tuple[str, int], torch.Tensor] = {}  # their boxes
        self.whole: dict[str, torch.Tensor] = {}

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Around all of a sync. What it leaves behind on an error is a mixture of old and new weights from which the next sync can
        start.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        from vllm.platforms import current_platform

        tied = {n for n, _ in self.model.named_parameters(remove_duplicate=False)} - {n for n, _ in self.model.named_parameters()}
        if current_platform.is_cpu():
            _forget_moe_kernels(self.model)
        _name_loaders(self.model)
        try:
            with torch.no_grad(), set_current_vllm_config(self.config), _quiet_reload():
                with self._left_alone():
                    initialize_layerwise_reload(self.model)
                self.counts = self.counts or self._counted(tied)
                self.left, self.whole = dict(self.counts), {}
                yield
                if self.whole:
                    self.model.load_weights(iter(sorted(self.whole.items(), key=lambda item: layer_order(item[0]))))
                if self.left:
                    short = ", ".join(f"{name} ({n} elements)" for name, n in list(self.left.items())[:3])
                    raise RuntimeError(f"{len(self.left)} modules did not get all of their weights: {short}")
                finalize_layerwise_reload(self.model, self.config.model_config)
                if current_platform.is_cpu():
                    _repack_kept_weights(self.model)
                self.plain = self.plain | self.learned
                self.rest = [] if self.trace.whole else self.rest or self._untouched()
        except BaseException:
            _leave_reload(self.model)
            raise

    @contextmanager
    def _left_alone(self) -> Iterator[None]:
        """Within it, a reload passes over modules that are written in place or not at all: for vLLM they are in a reload already."""
        from vllm.model_executor.model_loader.reload import layerwise

        infos = [layerwise.get_layerwise_info(self.model.get_submodule(path)) for path in (*self.plain, *self.rest)]
        for info in infos:
            info.load_numel_total = 0
        try:
            yield
        finally:
            for info in infos:
                info.reset()

    def _untouched(self) -> list[str]:
        """Modules that no tensor reaches and that the end of a reload does nothing to (it does to attention)."""
        from vllm.model_executor.model_loader.reload import layerwise

        deferred = layerwise.is_deferred_attention_layer if hasattr(layerwise, "is_deferred_attention_layer") else _is_attention
        return [path for path, module in self.model.named_modules() if path not in self.counts and not deferred(module)]

    def _counted(self, tied: set[str]) -> dict[str, int]:
        """Elements by module, of the model in the form in which a checkpoint is loaded: without what vLLM derives."""
        counts, missed, needed = {}, [], {name for name, _ in self.model.named_parameters()} - tied
        for name in (*needed, *(name for name, _ in self.model.named_buffers())):
            layer = LAYER.search(name)
            known = renumbered(name, self.like[int(layer[0])]) if layer else name
            module, _, last = name.rpartition(".")
            if known in self.trace.params:
                loaded = self.trace.params[known]
                counts[module] = counts.get(module, 0) + covered(x for _, x in loaded.links)
                if not loaded.full:
                    self.partial.setdefault(module, []).append(last)
            elif name in needed:
                missed.append(name)
        if missed and not self.trace.whole and self.config.model_config.quantization is None:
            raise RuntimeError(f"no tensor reaches the parameters {', '.join(sorted(missed)[:3])}")
        return counts

    def take(self, pieces: list[Arrived]) -> None:
        """Put elements where they belong. A module is handed to vLLM with its last one."""
        places, elements = [], []
        for name, offset, strides, piece in pieces:
            if name.startswith(WHOLE):
                self._collect(name, offset, strides, piece)
                continue
            places.append(self.ready.get((name, offset)))
            if places[-1] is None:
                places[-1] = self._place(name, offset, strides, piece.shape)
            elements.append(piece)
        if places:
            torch._foreach_copy_(places, elements)
        for name, _, _, piece in pieces:
            if (path := name.rpartition(".")[0]) in self.left:
                self.left[path] -= piece.numel()
                if self.left[path] == 0:
                    self._complete(path)

    def _place(self, name: str, offset: int, strides: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """A strided box of a parameter, whose module gets memory first if it is in the middle of a reload."""
        from vllm.model_executor.model_loader.reload import layerwise
        from vllm.model_executor.model_loader.reload.meta import materialize_layer

        path, _, last = name.rpartition(".")
        module = self.model.get_submodule(path)
        if path not in self.plain and self.left[path] == self.counts[path]:
            materialize_layer(module, layerwise.get_layerwise_info(module))
        if self.left[path] == self.counts[path]:
            for partial in self.partial.get(path, ()):
                getattr(module, partial).data.zero_()
        memory = getattr(module, last).data
        place = memory.as_strided(sizes, strides, memory.storage_offset() + offset)
        if path in self.plain:
            self.ready[name, offset] = place
        return place

    def _complete(self, path: str) -> None:
        """All elements of a module are there. Where vLLM's kernels read it just as it is loaded, the next sync writes straight to them."""
        from vllm.model_executor.model_loader.reload import layerwise

        del self.left[path]
        if path in self.plain:
            return
        module = self.model.get_submodule(path)
        info = layerwise.get_layerwise_info(module)
        loaded, (kernels, buffers) = dict(module.named_parameters(recurse=False)), info.kernel_tensors
        layerwise._layerwise_process(module, info)
        same = loaded.keys() == kernels.keys() and not buffers and not hasattr(module, "cpu_linear")
        if same and all(_same_memory(loaded[n], kernels[n]) for n in loaded):
            self.learned.add(path)

    def _collect(self, name: str, offset: int, strides: tuple[int, ...], elements: torch.Tensor) -> None:
        tensor = name.removeprefix(WHOLE)
        if tensor not in self.whole:
            layer = LAYER.search(tensor)
            shape = self.shapes[renumbered(tensor, self.like[int(layer[0])]) if layer else tensor]
            self.whole[tensor] = torch.empty(shape, dtype=elements.dtype, device=elements.device)
        self.whole[tensor].as_strided(elements.shape, strides, offset).copy_(elements)


def _is_attention(module: torch.nn.Module) -> bool:
    """As vLLM 0.26 tells the layers that it processes last."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    return isinstance(module, (Attention, MLAAttention))


def _same_memory(loaded: torch.Tensor, kernel: torch.Tensor) -> bool:
    """Whether a kernel's tensor is the loaded one, element by element at the same places."""
    same_form = (loaded.shape, loaded.stride(), loaded.dtype) == (kernel.shape, kernel.stride(), kernel.dtype)
    return same_form and torch.equal(loaded, kernel)


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


@contextmanager
def _quiet_reload() -> Iterator[None]:
    """Drop vLLM's warning about every module without a checkpoint tensor (each rotary table, at each sync).

    Parameters that no tensor reaches are found when the reload begins, modules that got too little when it ends.
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
