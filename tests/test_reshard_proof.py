"""Every family, from a grid of Megatron layouts into vLLM's: each element arrives where vLLM's own loader puts it, exactly once."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from moerl.layout import ParallelLayout
from moerl.models import FAMILIES, config_of, params_of, read_arch
from moerl.models.checkpoint import set_config
from moerl.reshard import offline
from tests import reshard_helpers as proof
from tests.test_families_serving import write

DENSE = {
    "1": {}, "tp2": dict(tp=2), "pp2 dp2": dict(pp=2, dp=2), "tp2 pp2": dict(tp=2, pp=2),
    "pp2 uneven": dict(pp=2, first_stage_layers=1), "pp2 vpp2": dict(pp=2, vpp=2), "tp2 pp2 dp4": dict(tp=2, pp=2, dp=4),
}
MOE = {
    "ep2": dict(ep=2, dp=2), "tp2 ep2": dict(tp=2, ep=2), "tp2 etp2": dict(tp=2, etp=2), "ep2 etp2": dict(ep=2, etp=2, dp=4),
    "tp2 pp2 ep2": dict(tp=2, pp=2, ep=2), "tp2 pp2 ep4 dp2": dict(tp=2, pp=2, ep=4, dp=2),
    "tp2 pp2 ep2 etp2 dp4": dict(tp=2, pp=2, ep=2, etp=2, dp=4),
    "ep4 dp4 pp2 vpp2": dict(ep=4, dp=4, pp=2, vpp=2),
}
ENGINES = [(1, False, 2), (2, False, 2), (2, True, 1)]  # workers of an engine, experts whole on one, engines


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    family = request.param
    path = write(tmp_path_factory.mktemp(family), family, 1)
    whole = read_arch(path)
    set_config(path, dtype="float32", **config_of(whole))
    arch = whole.main()
    params = params_of(arch)
    return path, arch, params, proof.iota(params)


@pytest.mark.parametrize("tp, experts, engines", ENGINES)
def test_every_element_arrives_once(model, tp, experts, engines):
    path, arch, params, tensors = model
    if experts and not arch.experts:
        pytest.skip("a dense model has no experts")
    config = offline.engine_config(str(path), tp, "float32", experts)
    found = proof.traces(config, tp, params)
    assert not any(trace.whole for trace in found)
    vllms = [proof.loaded(config, rank, tp, tensors) for rank in range(tp)]
    needed = engines * sum(v[~v.isnan()].count_nonzero() for own in vllms for v in own.values())
    tried = 0
    for layout in (ParallelLayout(**sizes) for sizes in (DENSE | (MOE if arch.experts else {})).values()):
        try:
            arch.check(layout)
        except ValueError:
            continue
        tried += 1
        for node in (2, 64):
            made = proof.make_plan(arch, params, layout, found, engines=engines, node=node)
            workers = proof.carried_out(made, proof.shards(tensors, params, arch, layout), proof.shapes_of(found, made, params))
            for i, worker in enumerate(workers):
                proof.assert_as_loaded(worker, vllms[i % tp])
            proof.loads(made)
            assert made.nbytes.sum() == 4 * needed
    assert tried >= (8 if arch.experts else 4)
