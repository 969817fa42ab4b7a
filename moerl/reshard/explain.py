"""What a plan costs, before anything runs: bytes by kind of link, balance, buffers, messages, and seconds on named hardware."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moerl.reshard.plan import GPU, NETWORK, NODE, Plan


@dataclass(frozen=True)
class Hardware:
    """Nominal rates of one GPU, bytes/s: HBM, NVLink each way, its share of the network each way (400 Gb/s a GPU)."""

    hbm: float
    nvlink: float
    network: float


# Datasheets of H100 SXM, H200 SXM and B200 (HGX), each with one 400 Gb/s adapter a GPU.
HARDWARE = {
    "h100": Hardware(3.35e12, 450e9, 50e9),
    "h200": Hardware(4.8e12, 450e9, 50e9),
    "b200": Hardware(8.0e12, 900e9, 50e9),
}
MESSAGE_S = 10e-6  # to start one message: assumed, not measured


@dataclass(frozen=True)
class Costs:
    """Bytes and counts of one sync. `egress` and `ingress` are (mean, most) network bytes of a rank that sends and of a worker."""

    delivered: int
    needed: int
    links: dict[int, int]
    relayed: int
    egress: tuple[float, float]
    ingress: tuple[float, float]
    buffers: int
    messages: int
    rounds: int


def costs(plan: Plan) -> Costs:
    size, apart, sent = plan.nbytes, plan.apart, plan.round >= 0
    network = apart == NETWORK
    out = np.bincount(plan.source[network], size[network], len(plan.place.ranks))
    into = np.bincount(plan.target[network], size[network], len(plan.place.workers))
    return Costs(
        delivered=int(size.sum()), needed=plan.needed, links={k: int(size[apart == k].sum()) for k in (GPU, NODE, NETWORK)},
        relayed=int(size[plan.relayed].sum()), egress=(float(out.mean()), float(out.max(initial=0))),
        ingress=(float(into.mean()), float(into.max(initial=0))),
        buffers=2 * int(_held(plan, sent, True).max() + _held(plan, sent, False).max()),
        messages=len(np.unique(np.stack([plan.source, plan.target, plan.relayed, plan.round])[:, sent], axis=1).T), rounds=plan.rounds,
    )


def seconds(plan: Plan, hardware: Hardware) -> float:
    """A forecast: rounds one after another, in each the busiest GPU's network, NVLink, copies and messages; reads of memory beside them.

    Packing and unpacking read and write every byte once each. Compute of vLLM's layouts after loading is not in it.
    """
    size, apart, sent = plan.nbytes, plan.apart, plan.round >= 0
    total = 0.0
    if plan.rounds:
        network = np.maximum(*(_held(plan, sent & (apart == NETWORK), side) for side in (True, False)))
        near = np.maximum(*(_held(plan, sent & (apart != NETWORK), side) for side in (True, False)))
        started = np.maximum(*(_held(plan, sent, side, np.ones_like(size)) for side in (True, False)))
        each = np.maximum(network / hardware.network, near / hardware.nvlink) + 2 * (network + near) / hardware.hbm + started * MESSAGE_S
        total = each.max(1).sum()
    read, target = ~sent, plan.target
    rate = np.where(apart == GPU, hardware.hbm / 2, hardware.nvlink)
    reads = np.bincount(target[read], size[read] / rate[read], len(plan.place.workers))
    return float(max(total, reads.max(initial=0)))


def _held(plan: Plan, rows: np.ndarray, sending: bool, weight: np.ndarray | None = None) -> np.ndarray:
    """Bytes (or sums of `weight`) of the rows by round and process: [rounds, ranks + workers], ranks first."""
    ranks, processes = len(plan.place.ranks), len(plan.place.ranks) + len(plan.place.workers)
    end = np.where(plan.relayed, ranks + plan.source, plan.source) if sending else ranks + plan.target
    at = plan.round[rows] * processes + end[rows]
    rounds = max(1, plan.rounds)
    return np.bincount(at, (plan.nbytes if weight is None else weight)[rows], rounds * processes).reshape(rounds, processes)


def faults(plan: Plan) -> list[str]:
    """What is wrong with a plan, a line each: deliveries that are missing or double, chunks passed on before they came, full buffers."""
    found = []
    expected = sum(len(c.moves) * len(plan.layers[c.kind]) for c in plan.chunks) * (len(plan.place.workers) // plan.tp)
    keys = np.unique(np.stack([plan.chunk, plan.layer, plan.target]), axis=1)
    if keys.shape[1] != len(plan.chunk) or len(plan.chunk) != expected:
        found.append(f"{keys.shape[1]} different deliveries in {len(plan.chunk)} rows, {expected} are needed")
    came = dict(zip(zip(plan.chunk.tolist(), plan.layer.tolist(), plan.target.tolist()), plan.round.tolist()))
    passed = zip(*(column[plan.relayed].tolist() for column in (plan.chunk, plan.layer, plan.source, plan.round)))
    early = [at for chunk, layer, source, at in passed if came.get((chunk, layer, source)) != at - 1]
    if early:
        found.append(f"{len(early)} chunks are not passed on in the round after they came")
    size, sent = plan.nbytes, plan.round >= 0
    own = sent & ~plan.relayed
    for rows, sending in ((own, True), (sent, False)):
        most = _held(plan, rows, sending).max()
        if most > max(plan.cap, int(size.max(initial=0))):
            found.append(f"a process {'sends' if sending else 'gets'} {int(most)} bytes in one round, {plan.cap} are allowed")
    nodes = np.array([node for node, _ in plan.place.workers])[plan.target]
    network = plan.apart == NETWORK
    once = np.unique(np.stack([plan.chunk, plan.layer, nodes])[:, network], axis=1).shape[1]
    if once != network.sum():
        found.append(f"{int(network.sum()) - once} chunks come to a node over the network again")
    return found


def report(plan: Plan, hardware: str) -> str:
    """The costs as text."""
    c = costs(plan)
    lines = [
        f"workers get       {_size(c.delivered)}, {c.delivered / c.needed:.4f}x of what they need ({_size(c.needed)})",
        f"  same GPU        {_size(c.links[GPU])}",
        f"  same node       {_size(c.links[NODE])}, of it passed on by workers {_size(c.relayed)}",
        f"  network         {_size(c.links[NETWORK])}, each chunk once a node",
        f"network egress    {_size(c.egress[0])} a rank, most {_size(c.egress[1])} ({_ratio(c.egress)}x)",
        f"network ingress   {_size(c.ingress[0])} a worker, most {_size(c.ingress[1])} ({_ratio(c.ingress)}x)",
        f"buffers           {_size(c.buffers)} at most in a process",
        f"messages          {c.messages:,} in {c.rounds} rounds",
        f"forecast          {seconds(plan, HARDWARE[hardware]):.2f} s on {hardware} (nominal rates, no kernel layouts)",
    ]
    whole = sorted({m.target for chunk in plan.chunks for moves in chunk.moves.values() for m in moves if m.target.startswith("whole:")})
    if whole:
        n = sum(c.nbytes * len(plan.layers[c.kind]) for c in plan.chunks if any(m.target in whole for ms in c.moves.values() for m in ms))
        lines.append(f"not traced        {len(whole)} tensors of the example layers go whole ({_size(n)}): {', '.join(whole[:3])}")
    return "\n".join([*lines, *(f"FAULT             {fault}" for fault in faults(plan))])


def _ratio(pair: tuple[float, float]) -> str:
    return f"{pair[1] / pair[0]:.3f}" if pair[0] else "1.000"


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.4g} {unit}"
        n /= 1000
    return f"{n:.4g} TB"
