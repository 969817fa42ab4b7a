"""Weight movement between processes of this machine's CPUs: a plan beside the gathering of whole tensors.

    python benchmarks/reshard.py OUT.json [--processes 4 8 16] [--runs 5]

A Qwen3-MoE of 430 MB in bfloat16 goes from N gloo processes of a Megatron layout into vLLM's tensor-parallel layout, two workers an
engine. Each process is a rank and a worker, as a GPU has one of both. Every case ran in the same processes, turn about:
  plan           moerl's plan and messages
  plan, mapped   the same with memory that is mapped instead of sent, as between processes of one host
  gather         every parameter gathered whole on every process and brought into Hugging Face's form, one after another, which is what
  other
                 stacks do; what vLLM's loaders would do with them then is not in its time, for the plan it is
Bytes are what leaves a process. Kept are all runs, versions and hardware.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from moerl.layout import ParallelLayout
from moerl.models import params_of, read_arch
from moerl.models.placement import held
from moerl.models.tensormap import copies, hf_shapes
from moerl.reshard.memory import flat, opened, share
from moerl.reshard.move import Mover, rounds_of
from moerl.reshard.names import renumbered
from moerl.reshard.plan import Place, plan
from moerl.reshard.sources import cut_layers, kinds, layer_of
from moerl.reshard.trace import Trace

CONFIG = dict(
    model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], vocab_size=8192, hidden_size=512, intermediate_size=512,
    moe_intermediate_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=64, num_experts=32,
    num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False,
    max_position_embeddings=512, rope_theta=1e6, rms_norm_eps=1e-6, hidden_act="silu", attention_bias=False,
)
LAYOUTS = {
    4: ParallelLayout(tp=2, ep=4, pp=1, dp=2), 8: ParallelLayout(tp=2, pp=2, ep=4, dp=2), 16: ParallelLayout(tp=2, pp=2, ep=8, dp=4),
}
CAP = 64 << 20


def vllm_traces(path: str, params, tp: int) -> list[Trace]:
    from moerl.reshard import offline

    layers = cut_layers(params)
    shapes = hf_shapes(p for p in params.values() if layer_of(p) < layers)
    config = offline.engine_config(path, tp, "bfloat16")
    found = []
    for rank in range(tp):
        with offline.worker(rank, tp):
            found.append(offline.trace_worker(config, shapes, layers))
    return found


def process(number: int, total: int, made, shapes, path: str, layout, port: int, runs: int, queue) -> None:
    """One of `total` processes: rank `number` and worker `number` in one, as on one GPU."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=total)
    arch = read_arch(path)
    params = params_of(arch)
    memory = {}
    for param, parts, _, _ in held(params, arch, layout, number):
        memory[param.name] = torch.full(param.local_shape(parts), (number + 1) / 64, dtype=torch.bfloat16)
    target = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes[number % len(shapes)].items()}

    def take(pieces) -> None:
        places = [target[name].view(-1).as_strided(x.shape, strides, offset) for name, offset, strides, x in pieces]
        torch._foreach_copy_(places, [x for *_, x in pieces])

    cpu, group = torch.device("cpu"), Both(number, total)
    out = made["sent"].rows(rank=number), made["sent"].rows(worker=number)
    mover = Mover(
        merged(rounds_of(out[0], rank=number), rounds_of(out[1], worker=number)), group, cpu,
        memory={n: flat(t) for n, t in memory.items()}, take=take,
    )
    handles = [None] * total
    dist.all_gather_object(handles, share(memory))
    reads = rounds_of(made["mapped"].rows(worker=number), worker=number)
    names: dict[int, set[str]] = {}
    for rank, (chunk, layer, worker) in (read for step in reads.values() for read in step.reads):
        names.setdefault(rank, set()).update(renumbered(move.param, layer) for move in chunk.moves[worker])
    mapped = Mover(reads, None, cpu, mapped={rank: opened(handles[rank], own) for rank, own in names.items()}, take=take)
    whole = Gather(number, layout, arch, params, memory)
    ways = {"plan": mover.run, "plan, mapped": mapped.run, "gather": whole.run}
    times = {name: [] for name in ways}
    for turn in range(runs + 1):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            dist.barrier()
            if turn:  # the first one touches new memory
                times[name].append(time.perf_counter() - start)
    if number == 0:
        queue.put((times, whole.nbytes))
    dist.barrier()


class Both:
    """Messages among processes that each are a rank and a worker: ranks and workers have the same numbers here."""

    def __init__(self, number: int, total: int):
        self.number, self.total = number, total

    def exchange(self, sends, recvs, tag: int) -> list:
        own = [t for peer, t in sends if peer % self.total == self.number]
        for (_, into), source in zip([r for r in recvs if r[0] % self.total == self.number], own):
            into.copy_(source)
        works = [dist.irecv(t, peer % self.total, tag=tag) for peer, t in recvs if peer % self.total != self.number]
        return works + [dist.isend(t, peer % self.total, tag=tag) for peer, t in sends if peer % self.total != self.number]


def merged(a, b):
    """The rounds of a rank and of a worker as those of one process."""
    from collections import defaultdict

    from moerl.reshard.move import Round

    found = defaultdict(Round)
    for rounds in (a, b):
        for number, step in rounds.items():
            for kind in ("sends", "relays", "recvs"):
                getattr(found[number], kind).update(getattr(step, kind))
            found[number].reads += step.reads
    return dict(sorted(found.items()))


class Gather:
    """Peers' way: one parameter after another is gathered whole on every process, brought into Hugging Face tensors."""

    def __init__(self, number: int, layout, arch, params, memory):
        self.number, self.memory = number, memory
        self.steps, self.nbytes = [], 0
        for param in params.values():
            if param.tied:
                continue
            owners = {}
            for rank in range(layout.world):
                for one, parts, index, owner in held({param.name: param}, arch, layout, rank):
                    if owner:
                        owners[index] = (rank, one.local_shape(parts), parts)
            self.steps.append((param, owners))
            self.nbytes += sum(2 * int(np.prod(shape)) for _, shape, _ in owners.values()) * (layout.world - 1)

    def run(self) -> None:
        for param, owners in self.steps:
            tensors = {p.name: torch.empty(p.shape, dtype=torch.bfloat16) for p in param.pieces}
            for index, (rank, shape, parts) in owners.items():
                part = self.memory[param.name] if rank == self.number else torch.empty(shape, dtype=torch.bfloat16)
                dist.broadcast(part, rank)
                box = part.view(param.box(parts))
                for copy in copies(param, parts, index):
                    copy.piece.arrange(tensors[copy.piece.name][copy.piece.box()])[copy.source].copy_(box[copy.target])


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def run(path: str, total: int, runs: int) -> dict:
    arch = read_arch(path)
    params, layout = params_of(arch), LAYOUTS[total]
    traces = vllm_traces(path, params, 2)
    place = {"sent": Place([(i, i) for i in range(total)], [(i, i) for i in range(total)]),
             "mapped": Place([(0, i) for i in range(total)], [(0, i) for i in range(total)])}
    start = time.perf_counter()
    made = {
        name: plan(arch, params, layout, traces, spots, cap=CAP, dtype="bfloat16", mapped=name == "mapped") for name, spots in place.items()
    }
    planning = time.perf_counter() - start
    shapes = []
    for trace in traces:
        every = {}
        for kind in kinds(params):
            for name, loaded in trace.params.items():
                every |= {renumbered(name, layer): loaded.shape for layer in kind.layers if layer >= 0 or ".layers." not in name}
        shapes.append(every)
    context = multiprocessing.get_context("spawn")
    queue, port = context.SimpleQueue(), free_port()
    processes = [context.Process(target=process, args=(i, total, made, shapes, path, layout, port, runs, queue)) for i in range(total)]
    for p in processes:
        p.start()
    times, gathered = queue.get()
    for p in processes:
        p.join()
    sent = made["sent"]
    return {
        "processes": total, "layout": layout.describe(), "into": f"{total // 2} engines of TP2", "planning_s": planning / 2,
        "needed_mb": sent.needed / 1e6, "delivered_mb": float(sent.nbytes.sum()) / 1e6,
        "wire_mb": float(sent.nbytes[sent.apart > 0].sum()) / 1e6, "gather_wire_mb": gathered / 1e6, "seconds": times,
        "median_s": {name: statistics.median(found) for name, found in times.items()},
        "gather_over_plan": statistics.median(times["gather"]) / statistics.median(times["plan"]),
    }


def main() -> None:
    from moerl.track.record import hardware, packages

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    result = {"hardware": hardware(), "packages": packages(), "cases": []}
    with tempfile.TemporaryDirectory() as path:
        Path(path, "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "bfloat16"}))
        for total in options.processes:
            result["cases"].append(run(path, total, options.runs))
            print(json.dumps(result["cases"][-1]), flush=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
