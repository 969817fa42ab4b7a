"""For any family, sizes and layout: the shards of all ranks are the checkpoint, every element in its one place. No process is started."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.layout import ParallelLayout
from moerl.models import FAMILIES, params_of
from moerl.models.placement import held
from moerl.models.tensormap import Param, Piece, assemble, copies, hf_shapes
from tests.test_parity import LAYOUTS

LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
DENSE = ("llama", "qwen2", "qwen3")


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def layouts(draw, family: str) -> tuple[ParallelLayout, int]:
    """A layout of at most 48 ranks, its stages even or not, and a number of layers that it can hold."""
    tp, pp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 4))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    dp = draw(st.integers(1, 48 // (tp * pp)))
    etp = draw(st.sampled_from(divisors(tp * dp))) if family not in (*DENSE, "gpt_oss") else 1
    ep = draw(st.sampled_from(divisors(tp * dp // etp))) if family not in DENSE else 1
    each = draw(st.integers(1, 2)) * vpp
    first, last = (draw(st.none() | st.integers(1, 3).map(lambda n: n * vpp)) if pp > 1 else None for _ in range(2))
    if pp == 2 and vpp > 1 and first:
        last = None
    given = [n for n in (first, last) if n]
    layout = ParallelLayout(tp=tp, pp=pp, vpp=vpp, dp=dp, etp=etp, ep=ep, first_stage_layers=first, last_stage_layers=last)
    return layout, sum(given) + each * (pp - len(given))


@st.composite
def config(draw, family: str, layout: ParallelLayout, layers: int) -> dict:
    """A `config.json` of random sizes that the layout divides, with the fields of every family in every one's spelling."""
    some = st.integers(1, 3)
    groups = layout.tp * draw(some)
    heads = groups if family in LATENT else groups * draw(some)
    experts, hidden = layout.ep * draw(some), draw(st.integers(1, 5))
    sizes = dict(
        model_type=family, num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=groups,
        head_dim=draw(st.sampled_from([2, 4, 6])), vocab_size=draw(st.integers(1, 700)), rms_norm_eps=1e-6,
        intermediate_size=(layout.etp if family in ("mixtral", "minimax_m2", "gpt_oss", "olmoe") else layout.tp) * draw(some),
        tie_word_embeddings=draw(st.booleans()), max_position_embeddings=64,
    )
    if family in DENSE:
        return sizes
    shared = draw(st.integers(1, 2))
    sizes |= dict(
        num_experts=experts, num_local_experts=experts, n_routed_experts=experts, num_experts_per_tok=draw(st.integers(1, experts)),
        moe_intermediate_size=layout.etp * layout.tp * draw(some), n_shared_experts=shared, n_group=1, topk_group=1,
        first_k_dense_replace=draw(st.integers(0, layers)),
    )
    if family in LATENT:
        sizes |= {name: draw(some) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
        sizes["q_lora_rank"] = draw(st.none() | some)
    if family == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = shared * layout.tp
    if family in ("qwen2_moe", "qwen3_moe"):
        sizes["mlp_only_layers"] = draw(st.lists(st.integers(0, layers - 1), unique=True))
        sizes["decoder_sparse_step"] = draw(st.integers(1, 2))
    if family == "glm4_moe":
        sizes |= dict(attention_bias=draw(st.booleans()), use_qk_norm=draw(st.booleans()))
    if family == "gpt_oss":
        sizes["sliding_window"] = 4
    return sizes


@st.composite
def models(draw, family: str):
    """(architecture, layout)"""
    layout, layers = draw(layouts(family))
    arch = FAMILIES[family].arch(draw(config(family, layout, layers)))
    arch.check(layout)
    return arch, layout


def numbered(params) -> dict[str, torch.Tensor]:
    """A checkpoint in which each element is a number of its own, none of them zero."""
    out, first = {}, 1
    for name, shape in hf_shapes(params.values()).items():
        out[name] = torch.arange(first, first + prod(shape)).view(shape)
        first += prod(shape)
    return out


def load(param, parts: int, index: int, tensors) -> torch.Tensor:
    """A shard in its logical shape, filled as loading fills it; an element that is filled twice is an error."""
    box, times = torch.zeros(param.box(parts), dtype=torch.int64), torch.zeros(param.box(parts), dtype=torch.int8)
    for copy in copies(param, parts, index):
        box[copy.target] = copy.piece.arrange(tensors[copy.piece.name][copy.piece.box()])[copy.source]
        times[copy.target] += 1
    assert times.max() <= 1 and torch.equal(times == 0, box == 0), param.name
    return box


@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_has_its_one_place(family):
    """Guards export and sync against an element that is lost, doubled or at another's place, in any layout the rules allow."""

    @settings(deadline=None, derandomize=True, database=None, max_examples=15)
    @given(models(family))
    def check(model):
        arch, layout = model
        params = params_of(arch)
        tensors = numbered(params)
        shards, owners, holders = {}, defaultdict(list), defaultdict(set)
        for rank in range(layout.world):
            for param, parts, index, owner in held(params, arch, layout, rank):
                key = (param.name, parts, index)
                holders[key].add(rank)
                if key not in shards:
                    shards[key] = load(param, parts, index, tensors)
                if owner:
                    owners[rank].append((param.name, shards[key].view(param.local_shape(parts)), parts, index))
        check_holders(params, layout, holders)
        check_parameters(params, shards, tensors)
        found = assemble(params, owners.values())
        assert set(found) == set(tensors) and all(torch.equal(found[n], t) for n, t in tensors.items())

    check()


def check_holders(params, layout, holders) -> None:
    """Every part of every parameter on all the ranks that Megatron's groups make replicas of one another, and on no other."""
    for (name, _, _), ranks in holders.items():
        replicas, shards = ("edp", "etp") if params[name].expert is not None else ("dp_cp", "tp")
        want = set(layout.group_of(replicas, min(ranks)))
        if params[name].split is None:
            want = {r for replica in want for r in layout.group_of(shards, replica)}
        assert ranks == want, name


def check_parameters(params, shards, tensors) -> None:
    """Shards end to end are the parameter on one rank, then padding; nothing but padding is empty."""
    by_name = defaultdict(dict)
    for (name, parts, index), shard in shards.items():
        by_name[name][index] = (parts, shard)
    for name, param in params.items():
        if param.tied and name not in by_name:
            continue
        found = by_name[name]
        parts = found[0][0]
        assert sorted(found) == list(range(parts)), name
        whole = load(replace(param, padded=0), 1, 0, tensors)
        assert whole.all(), name
        joined = torch.cat([found[i][1] for i in range(parts)], dim=param.split or 0)
        real = param.shape[param.split or 0]
        assert torch.equal(joined.narrow(param.split or 0, 0, real), whole), name
        assert not joined.narrow(param.split or 0, real, joined.shape[param.split or 0] - real).any(), name


SIZES = dict(
    num_hidden_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16, vocab_size=131, rms_norm_eps=1e-6,
    intermediate_size=32, max_position_embeddings=64, num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=32, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=24,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
)
MODELS = {
    "deepseek_v3": SIZES, "gpt_oss": SIZES | dict(sliding_window=4),
    "qwen2_moe": SIZES | dict(shared_expert_intermediate_size=32, mlp_only_layers=[1]),
    "llama": SIZES | dict(tie_word_embeddings=True),
}
NAMES = ("1", "tp2 etp2", "pp2 uneven", "pp2 vpp2", "tp2 pp2 ep2")
PLACES = [(f, n) for f in MODELS for n in NAMES if (f, n) != ("gpt_oss", "tp2 etp2")]


def held_job(rank, layout, arch):
    """What Megatron's modules hold, and what the map says they hold."""
    from moerl.megatron import build, weights

    params = params_of(arch)
    chunks = build.build(arch, layout, rank, torch.float32)
    real = sorted((s.name, s.parts, s.index, s.owner, tuple(s.tensor.shape)) for s in weights.shards(chunks, arch, layout, rank, params))
    return real, sorted((p.name, n, i, owner, p.local_shape(n)) for p, n, i, owner in held(params, arch, layout, rank))


@pytest.mark.parametrize("family, name", PLACES)
def test_megatrons_modules_hold_what_the_map_says(ranks, family, name):
    """Guards the properties above: the parts that they are about are those of the real modules, with their names and shapes."""
    layout = LAYOUTS[name] if family != "llama" else replace(LAYOUTS[name], ep=1, etp=1)
    for real, said in ranks.run(layout, held_job, FAMILIES[family].arch(MODELS[family])):
        assert real == said


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6])
def test_pieces_that_meet_inside_a_shard(parts):
    """Guards the arithmetic that no family needs today: pieces behind one another along the dimension that is cut."""
    pieces = tuple(Piece(n, (size, 2), (size, 2), (start, 0)) for n, size, start in (("a", 5, 0), ("b", 1, 5), ("c", 6, 6)))
    param = Param("p", (12, 2), 0, pieces, 2, "first")
    tensors = numbered({"p": param})
    joined = torch.cat([load(param, parts, i, tensors) for i in range(parts)])
    assert torch.equal(joined, torch.arange(1, 25).view(12, 2))
    found = assemble({"p": param}, [[("p", load(param, parts, i, tensors), parts, i)] for i in range(parts)])
    assert all(torch.equal(found[n], t) for n, t in tensors.items())
