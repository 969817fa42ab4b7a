"""The iota proof of a plan: every element of every tensor is a number of its own, and each must arrive where vLLM's own loader puts it."""

from __future__ import annotations

from math import prod

import torch

from moerl.models.placement import held
from moerl.models.tensormap import copies, hf_shapes
from moerl.reshard import offline
from moerl.reshard.names import LAYER, renumbered
from moerl.reshard.plan import WHOLE, Place, Plan, plan
from moerl.reshard.sources import cut_layers, layer_of

CAP = 1 << 14


def iota(params) -> dict[str, torch.Tensor]:
    """Tensors of the model in which no two elements are the same; float32 holds such numbers up to 2^24."""
    shapes, start, found = hf_shapes(params.values()), 1, {}
    for name, shape in shapes.items():
        found[name] = torch.arange(start, start + prod(shape), dtype=torch.float32).reshape(shape)
        start += prod(shape)
    assert start <= 2**24
    return found


def shards(tensors, params, arch, layout) -> list[dict[str, torch.Tensor]]:
    """Every rank's memory: its parts of the parameters, filled from the tensors."""
    ranks = []
    for rank in range(layout.world):
        own = {}
        for param, parts, index, _ in held(params, arch, layout, rank):
            if param.tied:
                continue
            local = torch.zeros(param.box(parts))
            for copy in copies(param, parts, index):
                local[copy.target] = copy.piece.arrange(tensors[copy.piece.name][copy.piece.box()])[copy.source]
            own[param.name] = local.reshape(param.local_shape(parts))
        ranks.append(own)
    return ranks


def loaded(config, rank: int, tp: int, tensors) -> dict[str, torch.Tensor]:
    """What vLLM's own loader makes of the tensors on one worker; NaN where it writes nothing."""
    with offline.worker(rank, tp):
        model = offline.make(offline.fresh(config), "cpu")
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
            model.load_weights(iter([(n, t.clone()) for n, t in tensors.items()]))
    weights = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if b.is_floating_point()}
    return {n: t.detach() for n, t in weights.items()}


def traces(config, tp: int, params, layers: int | None = None):
    layers = layers or cut_layers(params)
    shapes = hf_shapes(p for p in params.values() if layer_of(p) < layers)
    found = []
    for rank in range(tp):
        with offline.worker(rank, tp):
            found.append(offline.trace_worker(config, shapes, layers))
    return found


def spread(count: int, node: int) -> list[tuple[int, int]]:
    return [(i // node, i % node) for i in range(count)]


def make_plan(arch, params, layout, found, *, engines: int = 1, node: int = 8, mapped: bool = False, cap: int = CAP) -> Plan:
    place = Place(spread(layout.world, node), spread(engines * len(found), node))
    return plan(arch, params, layout, found, place, cap=cap, dtype="float32", mapped=mapped)


def view(memory: torch.Tensor, offset: int, sizes, strides) -> torch.Tensor:
    return memory.flatten().as_strided(sizes, strides, offset)


def carried_out(made: Plan, ranks, blank) -> list[dict[str, torch.Tensor]]:
    """Do what the plan says, round after round, on one machine. `blank` are the shapes of every worker's parameters."""
    workers = [{n: torch.zeros(shape) for n, shape in shapes.items()} for shapes in blank]
    payloads: dict[tuple[int, int, int], tuple[int, list[torch.Tensor]]] = {}
    for i in made.round.argsort(kind="stable").tolist():
        chunk, layer, source, target = made.chunks[made.chunk[i]], int(made.layer[i]), int(made.source[i]), int(made.target[i])
        moves = chunk.moves[target % made.tp]
        if made.relayed[i]:
            when, payload = payloads[int(made.chunk[i]), layer, source]
            assert when + 1 == made.round[i]
        else:
            payload = [
                view(ranks[source][renumbered(m.param, layer)], m.link.right, m.link.sizes, m.link.right_strides).clone() for m in moves
            ]
        payloads[int(made.chunk[i]), layer, target] = int(made.round[i]), payload
        assert sum(p.numel() for p in payload) * 4 == chunk.nbytes
        for move, part in zip(moves, payload, strict=True):
            memory = workers[target][renumbered(move.target, layer)]
            place = memory.view(-1).as_strided(move.link.sizes, move.link.left_strides, move.link.left)
            assert not place.any(), f"{move.target} is written twice"
            place.copy_(part)
    return workers


def shapes_of(found, made: Plan, params) -> list[dict[str, tuple[int, ...]]]:
    """Shapes of every worker's parameters, of all layers of every kind."""
    whole = hf_shapes(params.values())
    workers = []
    for trace in found:
        names = {n: p.shape for n, p in trace.params.items()} | {WHOLE + n: whole[n] for n in trace.whole}
        every = {}
        for name, shape in names.items():
            layer = LAYER.search(name)
            same = next((k for k in made.layers.values() if layer and k[0] == int(layer[0])), [0])
            every |= {renumbered(name, i): shape for i in same}
        workers.append(every)
    return workers * (len(made.place.workers) // made.tp)


def assert_as_loaded(found: dict[str, torch.Tensor], vllms: dict[str, torch.Tensor]) -> None:
    """The same elements at the same places, and zero where vLLM's loader writes nothing."""
    for name, want in vllms.items():
        if name not in found:
            assert want.isnan().all(), f"{name} was not delivered"
            continue
        assert torch.equal(found[name], want.nan_to_num(0.0).float()), name
    assert not found.keys() - vllms.keys()


def loads(made: Plan) -> None:
    """No process has more than a buffer's bytes in a round; a chunk of more than that is alone in it."""
    size = made.nbytes
    for ends, mine in ((made.source, ~made.relayed & (made.round >= 0)), (made.target, made.round >= 0)):
        total = {}
        for end, when, n in zip(ends[mine].tolist(), made.round[mine].tolist(), size[mine].tolist()):
            total[end, when] = total.get((end, when), 0) + n
        assert all(n <= max(made.cap, int(size.max())) for n in total.values())


def over_gloo(made: Plan, ranks, blank, *, checksums: bool = False, spoil=None, alone: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Do what the plan says with real messages, every process a thread. `spoil(process, messages)` may break something first."""
    import socket
    from concurrent.futures import ThreadPoolExecutor

    from moerl.reshard.memory import flat
    from moerl.reshard.move import Mover, rounds_of
    from moerl.reshard.transport import Messages

    with socket.socket() as free:
        free.bind(("", 0))
        master = f"127.0.0.1:{free.getsockname()[1]}"
    workers = [{n: torch.zeros(shape) for n, shape in shapes.items()} for shapes in blank]
    cpu = torch.device("cpu")

    def process(number: int) -> int:
        mine = dict(rank=number) if number < len(ranks) else dict(worker=number - len(ranks))
        messages = Messages(master, number, made.place, cpu, 3 if spoil else 30)
        if spoil:
            spoil(number, messages)

        def take(pieces) -> None:
            for name, offset, strides, elements in pieces:
                workers[number - len(ranks)][name].view(-1).as_strided(elements.shape, strides, offset).copy_(elements)

        memory = {n: flat(t) for n, t in ranks[number].items()} if number < len(ranks) else None
        mover = Mover(rounds_of(made.rows(**mine), **mine), messages, cpu, memory=memory, take=take, checksums=checksums)
        mover.run()
        return mover.nbytes

    everyone = range(len(ranks) + len(workers))
    with ThreadPoolExecutor(len(everyone)) as pool:
        running = [pool.submit(process, number) for number in everyone]
        if errors := [error for one in running if (error := one.exception())]:
            raise ExceptionGroup("processes failed", errors)
    held = [one.result() for one in running]
    assert max(held) <= 4 * (max(made.cap, int(made.nbytes.max())) + 64 * len(everyone))
    return workers
