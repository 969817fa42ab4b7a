"""Plans carried out with real messages and real shared memory; what breaks is noticed."""

from __future__ import annotations

import multiprocessing
import re

import pytest
import torch

pytest.importorskip("vllm")

from moerl.layout import ParallelLayout
from moerl.models import params_of, read_arch
from moerl.reshard import explain, offline, store
from moerl.reshard.memory import flat, opened, share
from moerl.reshard.plan import Place
from moerl.reshard.transport import meetings
from tests import reshard_helpers as proof
from tests.models import write_qwen3_moe


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A mixture of experts, what two workers load of it, and what their loaders make of it."""
    path = write_qwen3_moe(tmp_path_factory.mktemp("move") / "moe", head_dim=32)
    arch = read_arch(path)
    params = params_of(arch)
    tensors = proof.iota(params)
    config = offline.engine_config(str(path), 2, "float32")
    found = proof.traces(config, 2, params)
    return arch, params, tensors, found, [proof.loaded(config, rank, 2, tensors) for rank in range(2)]


def over_gloo(model, layout, *, engines=1, node=2, cap=proof.CAP, **more):
    arch, params, tensors, found, vllms = model
    made = proof.make_plan(arch, params, layout, found, engines=engines, node=node, cap=cap)
    workers = proof.over_gloo(made, proof.shards(tensors, params, arch, layout), proof.shapes_of(found, made, params), **more)
    for i, worker in enumerate(workers):
        proof.assert_as_loaded(worker, vllms[i % 2])
    return made


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize(
    "layout", [ParallelLayout(tp=2, pp=2), ParallelLayout(pp=2, ep=4, dp=4), ParallelLayout(tp=2, ep=2, etp=2, dp=2)],
    ids=ParallelLayout.describe,
)
def test_messages_bring_every_element(model, layout, checksums):
    made = over_gloo(model, layout, engines=2, checksums=checksums)
    assert made.rounds > 4 and not explain.faults(made)


def test_chunks_that_are_passed_on_within_a_node(model):
    """Four engines on one node, ranks on others: each chunk comes to the node once, the others hear of it from a worker."""
    arch, params, tensors, found, vllms = model
    layout = ParallelLayout(tp=2, pp=2)
    place = Place([(1, i) for i in range(4)], [(0, 10 + i) for i in range(8)])
    made = proof.plan(arch, params, layout, found, place, cap=proof.CAP, dtype="float32", mapped=True)
    costs = explain.costs(made)
    assert costs.links[explain.NETWORK] * 4 <= costs.delivered and costs.delivered == costs.needed and not explain.faults(made)
    workers = proof.over_gloo(made, proof.shards(tensors, params, arch, layout), proof.shapes_of(found, made, params), checksums=True)
    for i, worker in enumerate(workers):
        proof.assert_as_loaded(worker, vllms[i % 2])


def test_a_changed_byte_is_noticed(model):
    def spoil(process, messages):
        if process == 3:
            exchange = messages.exchange

            def changed(sends, recvs, tag):
                works = exchange(sends, recvs, tag)
                for work in works:
                    work.wait()
                for _, message in recvs:
                    message[5] += 1
                return []

            messages.exchange = changed

    with pytest.raises(ExceptionGroup) as failed:
        over_gloo(model, ParallelLayout(tp=2), checksums=True, spoil=spoil)
    wrong = re.compile(r"a message of \d+ bytes from process \d arrived with a wrong checksum")
    assert [e for e in failed.value.exceptions if wrong.match(str(e))]


def test_a_sender_that_is_gone_ends_the_receivers_wait(model):
    def spoil(process, messages):
        if process == 1:
            raise InterruptedError("gone")

    with pytest.raises(ExceptionGroup) as failed:
        over_gloo(model, ParallelLayout(tp=2), spoil=spoil)
    assert len(failed.value.exceptions) >= 3, "the rank that is gone, and both workers that wait for it"


def child(shared, names, pipe):
    mine = opened(shared, names)
    for _ in range(2):
        pipe.recv()
        pipe.send({name: t.tolist() for name, t in mine.items()})


def test_shared_memory_shows_later_changes_too():
    whole = torch.arange(12.0)
    tensors = {"a": whole[:4], "b": whole[4:].view(2, 4), "c": torch.ones(3, dtype=torch.bfloat16)}
    shared = share(tensors)
    assert len(shared.handles) == 2, "one handle a storage"
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(shared, ["b", "c"], there))
    process.start()
    here.send(1)
    assert here.recv() == {"b": flat(tensors["b"]).tolist(), "c": [1.0] * 3}
    whole.add_(1)
    here.send(1)
    assert here.recv()["b"] == [float(i) for i in range(5, 13)]
    process.join()


@pytest.mark.parametrize("gpus", [2, 8, 13])
def test_all_processes_on_different_gpus_meet_and_no_group_has_a_gpu_twice(gpus):
    """NCCL takes one process a GPU into a communicator."""
    place = Place([(i // 4, i) for i in range(gpus)], [(i // 4, i) for i in range(gpus)])
    spots = [*place.ranks, *place.workers]
    groups = meetings(place)
    assert all(len({spots[i] for i in group}) == len(group) for group in groups)
    met = {(a, b) for group in groups for a in group for b in group}
    assert all((a, b) in met for a in range(gpus) for b in range(gpus, 2 * gpus) if spots[a] != spots[b])
    assert all((a, b) in met for a in range(gpus, 2 * gpus) for b in range(gpus, 2 * gpus))
    apart = Place([(0, i) for i in range(4)], [(1, i) for i in range(4, 8)])
    assert meetings(apart) == [list(range(8))]


def test_a_plan_survives_a_file_and_its_faults_are_found(model, tmp_path):
    from dataclasses import replace

    arch, params, _, found, _ = model
    made = proof.make_plan(arch, params, ParallelLayout(pp=2, ep=2, dp=2), found, engines=2, node=2)
    store.save(made, tmp_path / "plan")
    again = store.load(tmp_path / "plan")
    assert again.chunks == made.chunks and explain.report(again, "h100") == explain.report(made, "h100")
    assert explain.faults(made) == []
    spoilt = (("target", 0, "different deliveries"), ("round", 3, "a process sends"), ("layer", 1, "different deliveries"))
    for column, wrong, line in spoilt:
        spoiled = getattr(made, column).copy()
        spoiled[:] = wrong
        assert any(line in fault for fault in explain.faults(replace(made, **{column: spoiled}))), line
    (tmp_path / "no").write_text("no")
    with pytest.raises(ValueError, match="not a reshard plan"):
        store.load(tmp_path / "no")
