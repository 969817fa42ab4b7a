"""Loading reads of a checkpoint what the rank holds, a tensor's part at a time: no process ever has the whole of it."""

from __future__ import annotations

import json
import threading
import time
from math import prod

import pytest
import torch
from safetensors.torch import save_file

from moerl.layout import ParallelLayout
from moerl.models import params_of, read_arch
from moerl.models.placement import held
from moerl.models.tensormap import hf_shapes

MIB = 2**20
LAYOUT = ParallelLayout(tp=2, pp=2, ep=2)
CONFIG = dict(
    model_type="qwen3_moe", hidden_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=128,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=1024, intermediate_size=2, norm_topk_prob=True,
    vocab_size=8192, rms_norm_eps=1e-6,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """480 MiB in bfloat16, a file a layer."""
    path = tmp_path_factory.mktemp("large")
    (path / "config.json").write_text(json.dumps(CONFIG))
    files: dict[str, dict] = {}
    for name, shape in hf_shapes(params_of(read_arch(path)).values()).items():
        part = name.split(".")[2] if ".layers." in name else "ends"
        files.setdefault(part, {})[name] = torch.ones(shape, dtype=torch.bfloat16)
    for part, tensors in files.items():
        save_file(tensors, path / f"{part}.safetensors")
    return path


def status(field: str) -> int:
    """Bytes of this process's memory of one kind. RssAnon leaves out the pages of mapped files, which the kernel takes back at will."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class Peak:
    """Growth of the anonymous memory while inside, sampled every millisecond."""

    def __enter__(self):
        self.start, self.most, self.done = status("RssAnon"), 0, threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self):
        while not self.done.is_set():
            self.most = max(self.most, status("RssAnon") - self.start)
            time.sleep(0.001)

    def __exit__(self, *error):
        self.done.set()
        self.thread.join()
        self.most = max(self.most, status("RssAnon") - self.start)


def load_job(rank, layout, path):
    """(bytes read from the checkpoint, growth of memory beside the model while it is filled)"""
    from moerl.megatron import build, weights
    from moerl.models.files import File

    arch = read_arch(path)
    params, read = params_of(arch), []
    plain = File.fill

    def counted(file, view, start):
        read.append(len(view))
        plain(file, view, start)

    chunks = build.build(arch, layout, rank, torch.bfloat16)
    for shard in weights.shards(chunks, arch, layout, rank, params):
        shard.tensor.zero_()  # so that the memory of the model itself is there and not counted
    File.fill = counted
    try:
        with Peak() as peak:
            weights.load(chunks, arch, layout, rank, path)
    finally:
        File.fill = plain
    return sum(read), peak.most


def test_a_rank_reads_its_own_part_in_bounded_memory(ranks, checkpoint):
    """Guards against a rank that reads tensors whole to cut them, or keeps what it has read: with 671 B parameters neither fits."""
    arch = read_arch(checkpoint)
    params = params_of(arch)
    total = sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
    largest = CONFIG["vocab_size"] * CONFIG["hidden_size"] * 2
    assert total > 400 * MIB
    for rank, (read, growth) in enumerate(ranks.run(LAYOUT, load_job, str(checkpoint))):
        own = sum(2 * prod(p.box(parts)) for p, parts, *_ in held(params, arch, LAYOUT, rank))
        assert own < total / 3 and read == own, rank
        assert growth < 3 * largest < own / 2, (rank, growth / MIB, own / MIB)
