"""What a run saves can be exported, and what is converted can be trained: the same values bit for bit, at every layout."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from checkpoint_tools import hf_to_megatron, megatron_to_hf
from moerl.controller import checkpoints
from moerl.layout import ParallelLayout
from moerl.models import config_of, params_of, read_arch
from moerl.models.arch import ModelError
from moerl.models.checkpoint import side_files, write_hf
from moerl.models.source import open_source
from moerl.models.tensormap import assemble, copy_again
from tests import train_jobs as jobs
from tests.models import tensors_of, write_deepseek, write_qwen3_moe, write_random
from tests.test_checkpoints import save
from tests.test_families_dense import COMMON, TINY
from tests.test_families_glm import WRITERS
from tests.test_parity import LAYOUTS

BUDGET = dict(memory=2**30, workers=1)
ALL = LAYOUTS | {"dp2": ParallelLayout(dp=2)}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write(path, kind: str):
    from transformers import AutoConfig

    if kind.startswith("deepseek"):
        write_deepseek(path, 3, mtp=True, tie_word_embeddings=kind.endswith("tied"))
    elif kind == "tied":
        write_qwen3_moe(path, tie_word_embeddings=True)
    elif kind == "qwen3_moe":
        write_qwen3_moe(path)
    else:
        write_random(path, WRITERS[kind]() if kind in WRITERS else AutoConfig.for_model(kind, **COMMON | TINY[kind]))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    made, root = {}, tmp_path_factory.mktemp("tiny")

    def get(kind: str):
        if kind not in made:
            made[kind] = write(root / kind.replace(" ", "_"), kind)
        return made[kind]

    return get


def state_job(rank, layout, path, directory, steps, options):
    """Save after some updates: the shards and values or nothing that the saved model has."""
    from moerl.megatron import checkpoint

    made = jobs.make(rank, layout, path, **options)
    for i in range(steps):
        jobs.step(made, jobs.samples(seed=i), rank, layout)
    checkpoint.save(made, directory)
    values = [r["values"].numpy() for r in made.values([jobs.samples(5)])] if made.value_head else []
    return [] if made.value_head else [(s.name, s.tensor.clone(), s.parts, s.index) for s in made.owned_shards()], values


@dataclass
class OnRanks:
    """A role of a run whose ranks are those of the tests."""

    ranks: object
    layout: ParallelLayout
    path: object
    steps: int = 1
    options: dict = field(default_factory=dict)

    def start_save(self, path: str) -> None:
        self.answers = self.ranks.run(self.layout, state_job, str(self.path), path, self.steps, self.options)

    def written(self, wait: bool) -> float:
        return 0.0

    def finish_save(self) -> None:
        pass


def saved(tmp_path, path, **roles):
    return save(tmp_path / "checkpoints", 3, roles, {}, 1, open_source(path))


def in_process(path, role: OnRanks, out):
    """What the end of a run writes."""
    arch, start = read_arch(path), open_source(path)
    params = params_of(arch)
    tensors = copy_again(params.values(), assemble(params, [shards for shards, _ in role.answers]), start.copies)
    return write_hf(out, tensors | start.kept(), path, dtype="float32", fields=config_of(arch))


def assert_same_checkpoint(one, two) -> None:
    ours, theirs = tensors_of(one), tensors_of(two)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    assert json.loads((one / "config.json").read_text()) == json.loads((two / "config.json").read_text())
    assert [f.name for f in side_files(one)] == [f.name for f in side_files(two)]
    for file in side_files(one):
        assert file.name == "config.json" or file.read_bytes() == (two / file.name).read_bytes()


@pytest.mark.parametrize(("kind", "name"), [
    ("qwen3_moe", "1"), ("qwen3_moe", "tp2 pp2 ep2"), ("qwen3_moe", "pp2 vpp2"), ("qwen3_moe", "tp2 etp2"), ("tied", "pp2"),
    ("deepseek mtp", "tp2 pp2 ep2"), ("deepseek mtp", "pp2 vpp2"), ("deepseek mtp tied", "pp2"), ("llama", "tp2 pp2"),
    ("gpt_oss", "tp2 pp2 ep2"), ("gpt_oss", "1"), ("glm4_moe", "tp2 etp2"),
])
def test_an_actor_with_its_optimizer_exports_as_the_run_exports_it(ranks, tiny, tmp_path, kind, name):
    path, layout = tiny(kind), (ALL | {"tp2 pp2": ParallelLayout(tp=2, pp=2)})[name]
    actor = OnRanks(ranks, layout, path)
    step = saved(tmp_path, path, actor=actor)
    assert "hf/config.json" in json.loads((step / checkpoints.MANIFEST).read_text())["files"]
    out = megatron_to_hf.convert(step, tmp_path / "out", role="actor", **BUDGET)
    assert_same_checkpoint(out, in_process(path, actor, tmp_path / "export"))
    before = tensors_of(path)
    assert sum(not torch.equal(before[n], t) for n, t in tensors_of(out).items()) > 10, "an untrained model would prove little"


@pytest.mark.parametrize(("kind", "name"), [("qwen3_moe", "tp2 pp2 ep2"), ("llama", "pp2"), ("mixtral", "tp2 ep2")])
def test_a_critic_exports_as_a_token_classifier(ranks, tiny, tmp_path, kind, name):
    """transformers' values of every response token are Megatron's."""
    from transformers import AutoModelForTokenClassification

    path, layout = tiny(kind), LAYOUTS[name]
    critic = OnRanks(ranks, layout, path, options={"value_head": True})
    out = megatron_to_hf.convert(saved(tmp_path, path, critic=critic), tmp_path / "out", role="critic", **BUDGET)
    assert tensors_of(out)["score.weight"].shape == (1, read_arch(path).hidden)
    model, info = AutoModelForTokenClassification.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    (values,) = critic.answers[layout.rank_of(pp=layout.pp - 1)][1]
    with torch.no_grad():
        theirs = [model.eval()(torch.tensor(s.tokens)[None]).logits[0, s.prompt - 1 : -1, 0].numpy() for s in jobs.samples(5)]
    assert np.abs(values).max() > 1e-2
    np.testing.assert_allclose(values, np.concatenate(theirs), atol=2e-4)


def test_a_checkpoint_without_optimizer_exports(ranks, tiny, tmp_path):
    """Untrained, so it is the start again; saved by ranks that only score."""
    path = tiny("deepseek mtp")
    role = OnRanks(ranks, LAYOUTS["tp2 ep2"], path, steps=0, options={"train": False})
    out = megatron_to_hf.convert(saved(tmp_path, path, actor=role), tmp_path / "out", **BUDGET)
    ours, start = tensors_of(out), tensors_of(path)
    assert ours.keys() == start.keys() and all(torch.equal(ours[n], start[n]) for n in start)


def test_an_unfinished_step_is_refused(ranks, tiny, tmp_path):
    path = tiny("qwen3_moe")
    step = saved(tmp_path, path, actor=OnRanks(ranks, LAYOUTS["1"], path, steps=0, options={"train": False}))
    (step / checkpoints.MANIFEST).unlink()
    with pytest.raises(ModelError, match="manifest.json is missing, so the checkpoint was not written to its end") as error:
        megatron_to_hf.convert(step, tmp_path / "out", **BUDGET)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


# ---- a converted checkpoint as the start


def same_job(rank, layout, hf, converted):
    """Names of the tensors that differ: as ranks read a converted checkpoint, and as Megatron-core itself loads it; for every role."""
    from megatron.core import dist_checkpointing

    from moerl.megatron import checkpoint
    from moerl.megatron.weights import shards

    def tensors(made):
        return {s.name: s.tensor.clone() for s in shards(made.bare(), made.arch, layout, rank, made.params, value_head=made.value_head)}

    wrong, count = [], 0
    for options in ({}, {"value_head": True}, {"train": False}):
        made = jobs.make(rank, layout, hf, **options)
        want = tensors(made)
        for tensor in [*made.bare()[0].parameters()]:
            tensor.detach().fill_(7.0)
        made.load_weights(converted)
        wrong += [(str(options), name) for name, tensor in tensors(made).items() if not torch.equal(tensor, want[name])]
        count += len(want)
    made = jobs.make(rank, layout, hf, train=False)
    want = tensors(made)
    for chunk in made.bare():
        for tensor in [*chunk.parameters()]:
            tensor.fill_(7.0)
    state = dist_checkpointing.load(checkpoint._model_state(made), converted)
    for i, chunk in enumerate(made.bare()):
        checkpoint._load_chunk(chunk, state[f"model{i}" if len(made.chunks) > 1 else "model"])
    wrong += [("Megatron-core", name) for name, tensor in tensors(made).items() if not torch.equal(tensor, want[name])]
    return wrong, count


@pytest.mark.parametrize(("kind", "name"), [
    ("qwen3_moe", "1"), ("qwen3_moe", "tp2"), ("qwen3_moe", "tp2 pp2 ep2"), ("qwen3_moe", "pp2 vpp2"), ("qwen3_moe", "tp2 etp2"),
    ("qwen3_moe", "dp2"), ("deepseek mtp", "tp2 pp2 ep2"), ("llama", "pp2"), ("gpt_oss", "tp2 pp2 ep2"),
])
def test_every_role_and_megatron_itself_load_a_converted_checkpoint(ranks, tiny, tmp_path, kind, name):
    converted = hf_to_megatron.convert(tiny(kind), tmp_path / "converted", **BUDGET)
    for wrong, count in ranks.run(ALL[name], same_job, str(tiny(kind)), str(converted)):
        assert not wrong and count > 20


def test_a_run_starts_from_a_converted_checkpoint(tmp_path):
    """Configuration and tokenizer lie beside it: the dry run accepts it, the engine starts without weights and gets them by the sync."""
    pytest.importorskip("vllm")
    import yaml
    from transformers import AutoTokenizer
    from typer.testing import CliRunner

    from moerl import demo_model
    from moerl.cli import app
    from moerl.controller.run import Processes, plan
    from tests.test_sync import assert_same_logprobs, config, move

    demo_model.main(["--out", str(tmp_path / "tokenizer")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    hf = write_qwen3_moe(tmp_path / "hf", head_dim=32, vocab_size=len(tokenizer) + 3)
    tokenizer.save_pretrained(hf)
    start = hf_to_megatron.convert(hf, tmp_path / "start", **BUDGET)
    settings = config(start, tmp_path / "run")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    shown = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml"), "--dry-run"])
    assert shown.exit_code == 0, shown.output
    planned = plan(settings)
    processes = Processes(planned)
    try:
        processes.sync(0)
        assert_same_logprobs(processes, processes.roles["actor"])
        ours, theirs = tensors_of(processes.export(tmp_path / "untrained", "float32")), tensors_of(hf)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)
        move(processes, planned.arch.vocab, 1)
        step = save(tmp_path / "checkpoints", 1, processes.trained(), {}, 1, planned.start)
        export = processes.export(tmp_path / "export", "float32")
    finally:
        processes.shutdown()
    assert_same_checkpoint(megatron_to_hf.convert(step, tmp_path / "out", **BUDGET), export)
