from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moerl.layout import GROUP_KINDS, LayoutError, ModelDims, ParallelLayout

DIMS = ModelDims(
    layers=8, hidden=64, heads=8, kv_heads=4, vocab=101, ffn=128, experts=8, expert_ffn=32, shared_expert_ffn=64
)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def layouts(draw) -> ParallelLayout:
    """Any layout of at most 64 ranks whose expert side folds."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    pp = draw(st.integers(1, min(5, 64 // tp)))
    cp = draw(st.integers(1, min(4, 64 // (tp * pp))))
    dp = draw(st.integers(1, 64 // (tp * pp * cp)))
    etp = draw(st.sampled_from(divisors(tp * cp * dp)))
    ep = draw(st.sampled_from(divisors(tp * cp * dp // etp)))
    return ParallelLayout(tp=tp, pp=pp, cp=cp, dp=dp, etp=etp, ep=ep)


# ---- ranks and groups


@settings(deadline=None, database=None)
@given(layouts())
def test_groups_are_megatrons(layout):
    from megatron.core.parallel_state import RankGenerator, default_embedding_ranks

    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=order)
    expert = RankGenerator(tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=order)
    assert dense.world_size == expert.world_size == layout.world
    tokens = {"tp": "tp", "cp": "cp", "dp": "dp", "dp_cp": "dp-cp", "pp": "pp", "mp": "tp-pp"}
    theirs = {kind: dense.get_ranks(token) for kind, token in tokens.items()}
    tokens = {"etp": "tp", "ep": "ep", "edp": "dp", "etp_ep": "tp-ep"}
    theirs |= {kind: expert.get_ranks(token) for kind, token in tokens.items()}
    theirs["embedding"] = [default_embedding_ranks(ranks) for ranks in dense.get_ranks("pp")]
    assert {kind: layout.groups(kind) for kind in GROUP_KINDS} == theirs


@settings(deadline=None, database=None)
@given(layouts())
def test_coords_and_ranks_are_inverse(layout):
    seen = set()
    for rank in range(layout.world):
        at = layout.coords(rank)
        assert layout.rank_of(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank
        assert layout.expert_rank_of(etp=at.etp, ep=at.ep, edp=at.edp, pp=at.pp) == rank
        seen.add((at.etp, at.ep, at.edp, at.pp))
    assert len(seen) == layout.world


@settings(deadline=None, database=None, max_examples=30)
@given(layouts(), st.sampled_from(GROUP_KINDS))
def test_group_of_is_the_group_with_the_rank(layout, kind):
    held = {rank: ranks for ranks in layout.groups(kind) for rank in ranks}
    for rank in range(layout.world):
        if rank in held:
            assert layout.group_of(kind, rank) == held[rank]
        else:
            assert kind == "embedding" and 0 < layout.coords(rank).pp < layout.pp - 1
            with pytest.raises(LayoutError, match=f"^rank {rank} is in no embedding group"):
                layout.group_of(kind, rank)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(),
        ParallelLayout(tp=2, pp=2, ep=2),
        ParallelLayout(tp=2, pp=3, cp=2, dp=2, ep=4),
        ParallelLayout(tp=4, pp=2, dp=2, ep=2, etp=2),
        ParallelLayout(tp=2, pp=2, vpp=2, cp=2, dp=3, ep=6, etp=2),
    ],
    ids=ParallelLayout.describe,
)
def test_what_megatron_really_initialises(layout):
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(layout.world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
        try:
            mpu.initialize_model_parallel(
                layout.tp,
                layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                create_gloo_process_groups=False,
            )
            groups = {
                "tp": mpu.get_tensor_model_parallel_group(),
                "cp": mpu.get_context_parallel_group(),
                "dp": mpu.get_data_parallel_group(),
                "dp_cp": mpu.get_data_parallel_group(with_context_parallel=True),
                "pp": mpu.get_pipeline_model_parallel_group(),
                "mp": mpu.get_model_parallel_group(),
                "etp": mpu.get_expert_tensor_parallel_group(),
                "ep": mpu.get_expert_model_parallel_group(),
                "edp": mpu.get_expert_data_parallel_group(),
                "etp_ep": mpu.get_expert_tensor_and_model_parallel_group(),
            }
            at = layout.coords(rank)
            if at.pp in (0, layout.pp - 1):
                groups["embedding"] = mpu.get_embedding_group()
            for kind, group in groups.items():
                assert layout.group_of(kind, rank) == sorted(dist.get_process_group_ranks(group)), kind
                if kind in at._fields:
                    assert getattr(at, kind) == dist.get_rank(group), kind
        finally:
            mpu.destroy_model_parallel()
            dist.destroy_process_group()


def test_rank_errors_name_the_rank_and_the_size():
    layout = ParallelLayout(tp=2, dp=2, ep=4)
    for call, message in [
        (lambda: layout.coords(4), "rank 4 is outside the world of 4 ranks"),
        (lambda: layout.group_of("tp", -1), "rank -1 is outside the world of 4 ranks"),
        (lambda: layout.rank_of(dp=2), "dp rank 2 is outside dp 2"),
        (lambda: layout.expert_rank_of(ep=4), "ep rank 4 is outside ep 4"),
        (lambda: layout.groups("xp"), f"group kind 'xp' is not one of {', '.join(GROUP_KINDS)}"),
    ]:
        with pytest.raises(LayoutError) as error:
            call()
        assert str(error.value) == message


def test_world_sets_dp():
    layout = ParallelLayout(tp=2, pp=2, cp=2)
    assert layout.with_world(32) == ParallelLayout(tp=2, pp=2, cp=2, dp=4)
    with pytest.raises(LayoutError, match=r"^world 12 is not a multiple of tp 2 \* cp 2 \* pp 2 = 8$"):
        layout.with_world(12)
    with pytest.raises(LayoutError, match="^pp 0 is below 1$"):
        ParallelLayout(pp=0).with_world(4)


def test_small_properties():
    assert ParallelLayout(tp=2, pp=2, ep=2).describe() == "TP2 PP2 EP2 DP1 (world 4)"
    uneven = ParallelLayout(pp=4, vpp=2, etp=2, cp=2, dp=3, first_stage_layers=2)
    assert uneven.describe() == "TP1 PP4 VPP2 ETP2 CP2 DP3 (world 24, first_stage_layers 2)"
    assert uneven.edp == 3 and not uneven.sequence_parallel and ParallelLayout(tp=2).sequence_parallel
    assert [ParallelLayout(tp=4).padded_vocab(v) for v in (1, 512, 513, 129280)] == [512, 512, 1024, 129536]
    with pytest.raises(LayoutError, match="expert ranks fold"):
        ParallelLayout(tp=2, ep=4).edp


# ---- pipeline stages


def megatron_layers(layers: int, layout: ParallelLayout) -> dict[tuple[int, int], range]:
    """(stage, chunk) -> layers, as Megatron-core itself builds them."""
    import torch
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_dtype=torch.float32,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
    )
    built = {}
    for pp_rank in range(layout.pp):
        for vp in range(layout.vpp):
            vp_stage = vp if layout.vpp > 1 else None
            start = get_transformer_layer_offset(config, vp_stage, pp_rank)
            built[pp_rank, vp] = range(start, start + get_num_layers_to_build(config, vp_stage, pp_rank))
    return built


def our_layers(layers: int, layout: ParallelLayout) -> dict[tuple[int, int], range]:
    return {(p, v): layout.stage_layers(layers, p, v) for p in range(layout.pp) for v in range(layout.vpp)}


@st.composite
def stages(draw) -> tuple[int, ParallelLayout]:
    """A model size and a pipeline that holds it: even, or uneven at one end or both, with and without chunks."""
    pp = draw(st.integers(1, 6))
    vpp = draw(st.integers(1, 4)) if pp > 1 else 1
    ends = [draw(st.none() | st.integers(1, 4)) if pp > 1 else None for _ in range(2)]
    given_ends = [end * vpp for end in ends if end is not None]
    assume(not (pp == 2 and len(given_ends) == 2 and vpp > 1))  # its own test, below
    layers = draw(st.integers(1, 4)) * vpp * (pp - len(given_ends)) + sum(given_ends)
    first, last = (None if end is None else end * vpp for end in ends)
    return layers, ParallelLayout(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)


@settings(deadline=None, database=None)
@given(stages())
def test_stage_layers_are_megatrons(drawn):
    layers, layout = drawn
    layout.check(ModelDims(layers=layers, hidden=8, heads=1, kv_heads=1, vocab=8, ffn=8))
    ours = our_layers(layers, layout)
    assert ours == megatron_layers(layers, layout)
    assert sorted(layer for chunk in ours.values() for layer in chunk) == list(range(layers))
    for (pp_rank, vp), chunk in ours.items():
        for index, layer in enumerate(chunk):
            assert layout.locate_layer(layers, layer) == (pp_rank, vp, index)
        assert layout.is_first(pp_rank, vp) == (0 in chunk)
        assert layout.is_last(pp_rank, vp) == (layers - 1 in chunk)


@settings(deadline=None, database=None, max_examples=300)
@given(
    layers=st.integers(1, 16),
    pp=st.integers(2, 4),
    vpp=st.integers(1, 3),
    first=st.none() | st.integers(0, 5),
    last=st.none() | st.integers(0, 5),
)
def test_stages_are_refused_exactly_where_megatron_cannot_build_them(layers, pp, vpp, first, last):
    layout = ParallelLayout(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)
    try:
        theirs = megatron_layers(layers, layout)
        held = sorted(layer for chunk in theirs.values() for layer in chunk)
        buildable = all(theirs.values()) and held == list(range(layers))
    except (ValueError, AssertionError, ZeroDivisionError):
        buildable = False
    if buildable:
        assert our_layers(layers, layout) == theirs
    else:
        with pytest.raises(LayoutError):
            layout.stage_layers(layers, 0, 0)


def test_both_ends_given_with_two_chunked_stages_divides_by_zero_in_megatron():
    layout = ParallelLayout(pp=2, vpp=2, first_stage_layers=2, last_stage_layers=6)
    with pytest.raises(ZeroDivisionError):
        megatron_layers(8, layout)
    with pytest.raises(LayoutError, match="with pp 2 and vpp 2: give only one"):
        layout.stage_layers(8, 0, 0)
    one = ParallelLayout(pp=2, vpp=2, first_stage_layers=2)
    assert our_layers(8, one) == megatron_layers(8, one)


def test_stage_and_layer_out_of_range():
    layout = ParallelLayout(pp=2)
    with pytest.raises(LayoutError, match="^stage 2 chunk 0 is outside pp 2 vpp 1$"):
        layout.stage_layers(8, 2)
    with pytest.raises(LayoutError, match="^layer 8 is outside a model of 8 layers$"):
        layout.locate_layer(8, 8)


# ---- rules


@pytest.mark.parametrize(
    ("layout", "dims", "world", "lines"),
    [
        (dict(tp=0, ep=-1), {}, None, ["tp 0 is below 1", "ep -1 is below 1"]),
        ({}, dict(layers=0, ffn=-1), None, ["layers 0 is below 1", "ffn -1 is below 0"]),
        (
            dict(tp=4),
            dict(heads=6),
            None,
            ["heads 6 is not divisible by tp 4 (attention heads are split over tensor-parallel ranks)"],
        ),
        (
            dict(tp=8),
            {},
            None,
            ["kv_heads 4 is not divisible by tp 8 (key-value heads are split over tensor-parallel ranks)"],
        ),
        (
            dict(tp=2),
            dict(ffn=129, shared_expert_ffn=65),
            None,
            [
                "ffn 129 is not divisible by tp 2 (dense MLP columns are split over tensor-parallel ranks)",
                "shared_expert_ffn 65 is not divisible by tp 2"
                " (shared-expert columns are split over tensor-parallel ranks)",
            ],
        ),
        (
            dict(dp=3, etp=3),
            {},
            None,
            ["expert_ffn 32 is not divisible by etp 3 (expert columns are split over expert-tensor ranks)"],
        ),
        (
            dict(dp=3, ep=3),
            {},
            None,
            ["experts 8 is not divisible by ep 3 (every expert-parallel rank holds the same number of experts)"],
        ),
        (dict(dp=2, ep=2), dict(experts=0), None, ["ep 2 needs experts, and the model has 0"]),
        (
            dict(tp=2, dp=2, ep=8),
            {},
            None,
            [
                "tp 2 * cp 1 * dp 2 = 4 is not divisible by etp 1 * ep 8 = 8"
                " (expert ranks fold over the ranks of one pipeline stage)"
            ],
        ),
        (
            dict(pp=2, vpp=3),
            {},
            None,
            [
                "layers 8 is not divisible by pp 2 * vpp 3 = 6"
                " (every pipeline chunk holds the same number of layers)"
            ],
        ),
        (dict(vpp=2), {}, None, ["vpp 2 needs pp above 1, and pp is 1"]),
        (dict(first_stage_layers=8), {}, None, ["first_stage_layers 8 needs pp above 1, and pp is 1"]),
        (dict(last_stage_layers=3), {}, None, ["last_stage_layers 3 needs pp above 1, and pp is 1"]),
        (
            dict(pp=3, first_stage_layers=0),
            {},
            None,
            ["first_stage_layers 0 is below 1 (no stage may be empty)"],
        ),
        (
            dict(pp=3, first_stage_layers=4, last_stage_layers=4),
            {},
            None,
            [
                "layers 8 less first_stage_layers 4 + last_stage_layers 4 leaves 0 for 1 stages"
                " (no stage may be empty)"
            ],
        ),
        (
            dict(pp=2, first_stage_layers=4, last_stage_layers=3),
            {},
            None,
            ["first_stage_layers 4 + last_stage_layers 3 = 7 is not layers 8 (pp 2 has no other stage)"],
        ),
        (
            dict(pp=3, first_stage_layers=3),
            {},
            None,
            [
                "layers 8 less first_stage_layers 3 = 5 is not divisible by 2 stages * vpp 1 = 2"
                " (the other stages share the rest evenly)"
            ],
        ),
        (
            dict(pp=2, vpp=2, first_stage_layers=3),
            dict(layers=7),
            None,
            ["first_stage_layers 3 is not divisible by vpp 2 (every chunk of a stage holds the same number of layers)"],
        ),
        (dict(tp=2, pp=2), {}, 6, ["world 6 is not a multiple of tp 2 * cp 1 * pp 2 = 4"]),
        (dict(tp=2, pp=2), {}, 8, ["world 8 is not tp 2 * cp 1 * dp 1 * pp 2 = 4"]),
        (
            dict(tp=4, pp=3, dp=2),
            dict(heads=6),
            20,
            [
                "world 20 is not a multiple of tp 4 * cp 1 * pp 3 = 12",
                "heads 6 is not divisible by tp 4 (attention heads are split over tensor-parallel ranks)",
                "layers 8 is not divisible by pp 3 * vpp 1 = 3 (every pipeline chunk holds the same number of layers)",
            ],
        ),
    ],
)
def test_broken_rules_are_all_named(layout, dims, world, lines):
    with pytest.raises(LayoutError) as error:
        ParallelLayout(**layout).check(ModelDims(**(vars(DIMS) | dims)), world)
    assert str(error.value).split("\n") == lines


def test_sound_layouts_pass():
    ParallelLayout().check(DIMS, world=1)
    ParallelLayout(tp=4, pp=2, vpp=2, cp=2, dp=2, ep=8, etp=2).check(DIMS, world=32)
    ParallelLayout(tp=2).check(ModelDims(layers=1, hidden=3, heads=2, kv_heads=2, vocab=5, ffn=4))
    deepseek_v3 = ModelDims(
        layers=61,
        hidden=7168,
        heads=128,
        kv_heads=128,
        vocab=129280,
        ffn=18432,
        experts=256,
        expert_ffn=2048,
        shared_expert_ffn=2048,
    )
    layout = ParallelLayout(tp=2, pp=16, ep=8, dp=8, last_stage_layers=1)
    layout.check(deepseek_v3, world=256)
    assert [len(layout.stage_layers(61, p)) for p in range(16)] == [4] * 15 + [1]
