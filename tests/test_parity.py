"""The Megatron model is the transformers model: same logits, and the same tensors back, at every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moerl.layout import ParallelLayout
from moerl.models import params_of, read_arch
from moerl.models.checkpoint import HFReader, write_hf
from moerl.models.tensormap import Assembler, Copy, Piece, copies, hf_shapes
from tests import train_jobs as jobs

LAYOUTS = {
    "1": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "tp2 etp2": ParallelLayout(tp=2, etp=2),
    "pp2": ParallelLayout(pp=2),
    "pp2 uneven": ParallelLayout(pp=2, first_stage_layers=1, last_stage_layers=3),
    "ep2": ParallelLayout(dp=2, ep=2),
    "tp2 ep2": ParallelLayout(tp=2, ep=2),
    "tp2 ep2 etp2": ParallelLayout(tp=2, dp=2, ep=2, etp=2),
    "pp2 vpp2": ParallelLayout(pp=2, vpp=2),
    "tp2 pp2 ep2": ParallelLayout(tp=2, pp=2, ep=2),
}


def logits_job(rank, layout, path, micro_batches):
    """Whole-vocabulary logits of every token, gathered over tensor-parallel ranks; one array a micro-batch."""
    from megatron.core import parallel_state

    from moerl.megatron import step

    made = jobs.make(rank, layout, path, train=False)

    def head(output, batch):
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(output) for _ in range(layout.tp)]
        torch.distributed.all_gather(parts, output.contiguous(), group=group)
        return output.sum() * 0, {"logits": torch.cat(parts, -1)[0].numpy()}

    return [r["logits"] for r in step.run(made.chunks, micro_batches, head, align=layout.tp, train=False)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_equal_transformers(ranks, tiny_moe, name):
    from transformers import AutoModelForCausalLM

    layout = LAYOUTS[name]
    batch = jobs.samples(9)
    micro = [batch[:4], batch[4:]]
    answers = ranks.run(layout, logits_job, str(tiny_moe), micro)
    model = AutoModelForCausalLM.from_pretrained(tiny_moe, dtype=torch.float32)
    for got, samples in zip(answers[layout.rank_of(pp=layout.pp - 1)], micro):
        at = 0
        for sample in samples:
            with torch.no_grad():
                want = model(torch.tensor(sample.tokens)[None]).logits[0].numpy()
            ours = got[at : at + len(sample.tokens), : want.shape[1]]
            at += len(sample.tokens)
            assert np.abs(ours - want).max() < 1e-4


def export_job(rank, layout, path):
    made = jobs.make(rank, layout, path, train=False)
    return [(s.name, s.tensor.clone(), s.parts, s.index) for s in made.owned_shards()]


@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip_is_bit_exact(ranks, tiny_moe, tmp_path, name):
    params = params_of(read_arch(tiny_moe))
    whole = Assembler(params)
    for shards in ranks.run(LAYOUTS[name], export_job, str(tiny_moe)):
        for shard in shards:
            whole.add(*shard)
    write_hf(tmp_path / "out", whole.finish(), tiny_moe)
    before, after = HFReader(tiny_moe), HFReader(tmp_path / "out")
    assert set(before.files) == set(after.files)
    for tensor, shape in hf_shapes(params.values()).items():
        box = Copy(Piece(tensor, shape, shape, (0,) * len(shape)), tuple(slice(0, n) for n in shape), ())
        assert torch.equal(before.read(box), after.read(box)), tensor


def tied_job(rank, layout, path):
    made = jobs.make(rank, layout, path, train=False)
    micro = [jobs.samples(4)]
    found = made.logprobs(micro, 1.0)
    return [(s.name, s.tensor.clone(), s.parts, s.index) for s in made.owned_shards()], [f["logp"].numpy() for f in found]


@pytest.mark.parametrize("name", ["1", "tp2", "pp2"])
def test_tied_embeddings(ranks, tmp_path_factory, name):
    """With a pipeline both ends hold the table: it is read twice, scored right and exported once."""
    from tests.models import write_qwen3_moe

    path = write_qwen3_moe(tmp_path_factory.mktemp("tied") / name.replace(" ", "_"), tie_word_embeddings=True)
    whole = Assembler(params_of(read_arch(path)))
    answers = ranks.run(LAYOUTS[name], tied_job, str(path))
    for shards, _ in answers:
        for shard in shards:
            whole.add(*shard)
    assert "lm_head.weight" not in whole.finish()
    assert np.abs(answers[-1][1][0] - reference_logp(path, jobs.samples(4), 1.0)).max() < 1e-4


def reference_logp(path, samples, temperature):
    """Log-probabilities of the response tokens by transformers, samples one after another."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = []
    for s in samples:
        with torch.no_grad():
            logp = (model(torch.tensor(s.tokens)[None]).logits[0] / temperature).log_softmax(-1)
        at = torch.arange(s.prompt - 1, len(s.tokens) - 1)
        out.append(logp[at, torch.tensor(s.tokens[s.prompt :])].numpy())
    return np.concatenate(out)


def logprob_job(rank, layout, path, temperature):
    made = jobs.make(rank, layout, path, train=False)
    return [(r["logp"].numpy(), r["entropy"].numpy()) for r in made.logprobs([jobs.samples(5)], temperature)]


def test_temperature_is_applied_as_the_sampler_applies_it(ranks, tiny_moe):
    """Log-probabilities are those of softmax(logits / temperature): the distribution the tokens were drawn from."""
    ((logp, _),) = ranks.run(LAYOUTS["tp2"], logprob_job, str(tiny_moe), 0.6)[0]
    assert np.abs(logp - reference_logp(tiny_moe, jobs.samples(5), 0.6)).max() < 1e-4
    assert np.abs(logp - reference_logp(tiny_moe, jobs.samples(5), 1.0)).max() > 1e-2


def bias_job(rank, layout, path):
    """A router bias is a buffer: it must be loaded and exported like a weight, and stay still in training."""
    import dataclasses

    from moerl.megatron import model, weights
    from moerl.megatron.optimizer import Schedule
    from moerl.models import read_arch

    arch = dataclasses.replace(read_arch(path), expert_bias=True)
    made = model.make(arch, layout, rank, torch.float32, optimizer=jobs.OPTIMIZER, schedule=Schedule(1e-2))
    for shard in weights.shards(made.bare(), arch, layout, rank, made.params):
        shard.tensor.copy_(torch.linspace(-1, 1, shard.tensor.numel()).view(shard.tensor.shape))
    made.optimizer.reload_model_params()
    before = {s.name: s.tensor.clone() for s in made.owned_shards() if "expert_bias" in s.name}
    jobs.step(made, jobs.samples(), rank, layout)
    after = {s.name: s.tensor for s in made.owned_shards()}
    return len(before), all(torch.equal(after[name], value) for name, value in before.items()), sorted(before)


def test_expert_bias_is_exported_and_does_not_move(ranks, tiny_moe):
    (count, still, names), = ranks.run(ParallelLayout(), bias_job, str(tiny_moe))
    assert names == [f"decoder.layers.{i}.mlp.router.expert_bias" for i in (0, 2, 3)] and count == 3
    assert still


def test_unmapped_tensor_is_an_error(ranks, tiny_moe):
    with pytest.raises(AssertionError, match="expert_bias .* is not in the tensor map"):
        ranks.run(ParallelLayout(), unmapped_job, str(tiny_moe))


def unmapped_job(rank, layout, path):
    import dataclasses

    from moerl.megatron import build, weights
    from moerl.models import read_arch

    arch = read_arch(path)
    chunks = build.build(dataclasses.replace(arch, expert_bias=True), layout, rank, torch.float32)
    list(weights.shards(chunks, arch, layout, rank, params_of(arch)))


def test_copies_cover_every_element_once(tiny_moe):
    """Over all shards of every parameter each Hugging Face element is read once, at any number of parts that divides."""
    for param in params_of(read_arch(tiny_moe)).values():
        for parts in (1, 2) if param.split is not None else (1,):
            seen = {p.name: np.zeros(p.view, dtype=int) for p in param.pieces}
            for index in range(parts):
                for copy in copies(param, parts, index):
                    seen[copy.piece.name][copy.source] += 1
            assert all((count == 1).all() for count in seen.values()), param.name
