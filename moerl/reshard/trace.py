"""Which elements of which Hugging Face tensors a vLLM worker loads where: found by watching vLLM's own loaders.

Tensors on the meta device have no elements, yet a storage, an offset and strides: a view says by itself which elements of its base it is.
So a loader runs on meta tensors of the real shapes, and only what moves elements is written down. Nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moerl.reshard.links import Link, NotStrided, covered, join, link

aten = torch.ops.aten
COPIES = {aten.clone.default, aten._to_copy.default}
FILLS = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}
# These take a tensor's form, not its elements.
FRESH = {aten.zeros_like.default, aten.empty_like.default, aten.ones_like.default, aten.full_like.default}


@dataclass
class Loaded:
    """One parameter as a worker loads it: its shape, its dtype's name, and the links from it to Hugging Face tensors."""

    shape: tuple[int, ...]
    dtype: str
    links: list[tuple[str, Link]] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether every element comes from a tensor; the others are zero (padding, and terms that another worker adds)."""
        return covered(link for _, link in self.links) == prod(self.shape)


@dataclass
class Trace:
    """What one worker loads: parameters by name, and `whole`, the tensors that its own loader has to be given, with the reason."""

    params: dict[str, Loaded]
    whole: dict[str, str]


class Watch(TorchDispatchMode):
    """Writes down every move of elements between storages while it is on. `sources` are named tensors whose elements are followed."""

    def __init__(self, sources: Mapping[str, torch.Tensor]):
        super().__init__()
        self.names = {_storage(t): name for name, t in sources.items()}
        self.moves: dict[int, list[tuple[Link, int]]] = {}  # by target storage: target <- source, and the source's storage
        self.lost: dict[int, str] = {}  # by storage: what ended the trail
        self.cleared: set[int] = set()  # storages of sources that were set to zero
        self.fed: dict[int, set[str]] = {}  # by storage: names of all tensors that flowed into it
        self.kept: list[torch.Tensor] = list(sources.values())  # a freed storage's address would be another one's

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is aten.copy_.default:
            self._move(args[0], args[1].expand_as(args[0]), func)
        elif func in COPIES:
            self._move(out, args[0], func)
        elif func is aten.cat.default:
            dim, start = (args[1] if len(args) > 1 else 0), 0
            for part in args[0]:
                self._move(out.narrow(dim, start, part.shape[dim]), part, func)
                start += part.shape[dim]
        elif func in FILLS:
            self._fill(args[0], func is aten.zero_.default or args[1] == 0)
        else:
            self._other(func, args, out)
        return out

    def _names(self, tensor: torch.Tensor) -> set[str]:
        key = _storage(tensor)
        return {self.names[key]} if key in self.names else self.fed.get(key, set())

    def _move(self, target: torch.Tensor, source: torch.Tensor, func) -> None:
        key, origin = _storage(target), _storage(source)
        self.kept += [target, source]
        if key == origin:
            if self._names(target):
                self.lost[key] = f"{func} within one memory"
            return
        names = self._names(source)
        self.fed.setdefault(key, set()).update(names)
        if origin in self.cleared:
            self._fill(target, True)
        elif not names:
            if key in self.moves:
                self.lost[key] = f"{func} of elements of no tensor"
        elif any(step == 0 and n > 1 for step, n in zip(source.stride(), source.shape)):
            self.lost[key] = "elements are repeated"
        else:
            self.moves.setdefault(key, []).append((link(target, source), origin))

    def _fill(self, target: torch.Tensor, zero: bool) -> None:
        """What nothing is moved to counts as zero, so only a fill with something else, or over moved elements, needs a note."""
        key = _storage(target)
        whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
        if not self._names(target):
            return
        if zero and whole and key in self.names:
            self.cleared.add(key)
        elif zero and whole:
            self.moves[key] = []
        elif not zero or key in self.names or any(join(m.flipped(), link(target, target)) for m, _ in self.moves.get(key, [])):
            self.lost[key] = "elements are filled with a number"

    def _other(self, func, args, out) -> None:
        """Views need nothing; an operation that makes new elements out of followed ones ends their trail, and is remembered by name."""
        inputs = [a for some in args for a in (some if isinstance(some, (list, tuple)) else [some]) if isinstance(a, torch.Tensor)]
        names = {name for a in inputs for name in self._names(a)}
        if not names or func in FRESH:
            return
        own = {_storage(a) for a in inputs}
        for result in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(result, torch.Tensor) and (_storage(result) not in own or func._schema.is_mutable):
                self.kept.append(result)
                self.lost[_storage(result)] = f"{func} on the way"
                self.fed.setdefault(_storage(result), set()).update(names)

    def origins(self, key: int) -> list[tuple[str, Link]]:
        """Links from a storage to named tensors. NotStrided, with the reason, where the trail is lost."""
        if key in self.lost:
            raise NotStrided(self.lost[key])
        latest = {(m.left, m.left_strides, m.sizes): (m, origin) for m, origin in self.moves.get(key, [])}  # the later of two moves counts
        found = []
        for move, origin in latest.values():
            if origin in self.names:
                found.append((self.names[origin], move))
            else:
                found += [(name, joined) for name, first in self.origins(origin) for joined in join(move, first)]
        return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def trace(model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Trace:
    """Trace `model.load_weights` of a model on the meta device for Hugging Face tensors of these shapes.

    Where one parameter of a module cannot be traced, all tensors of that module are to be loaded whole. ValueError names parameters that
    no tensor reaches.
    """
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    watch = Watch(tensors)
    with torch.no_grad(), watch:
        model.load_weights(iter(tensors.items()))
    params, lost, feeds = {}, {}, {}
    needed = {name for name, _ in model.named_parameters()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        key, module = _storage(tensor.data), name.rpartition(".")[0]
        feeds.setdefault(module, set()).update(watch.fed.get(key, set()))
        try:
            params[name] = Loaded(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), watch.origins(key))
            if covered(x for _, x in params[name].links) > tensor.numel():
                raise NotStrided("elements are loaded more than once")
        except NotStrided as error:
            lost[module] = f"{name}: {error}"
    missed = [name for name in needed if not watch.fed.get(_storage(model.get_parameter(name).data))]
    if missed:
        raise ValueError(f"no tensor reaches the parameters {', '.join(sorted(missed)[:5])}")
    whole = {tensor: why for module, why in lost.items() for tensor in feeds[module]}
    fed = {name for name, t in [*model.named_parameters(), *model.named_buffers()] if watch.fed.get(_storage(t.data))}
    return Trace({name: p for name, p in params.items() if name in fed and name.rpartition(".")[0] not in lost}, whole)
