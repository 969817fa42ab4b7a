"""Conversion between the formats: every tensor of every family and source format, restarts, budgets, hosts, and input that is bad."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from checkpoint_tools import boxes, hf_to_megatron, megatron_to_hf, output
from checkpoint_tools.stream import StreamError
from moerl.cli import app
from moerl.layout import ParallelLayout
from moerl.models import config_of, fp8, params_of, read_arch, torch_dist
from moerl.models.arch import ModelError
from moerl.models.checkpoint import HFReader
from moerl.models.source import open_source
from tests import train_jobs as jobs
from tests.models import write_deepseek, write_mxfp4, write_qwen3_moe, write_random
from tests.test_families_deepseek import write_float8
from tests.test_families_dense import tiny
from tests.test_families_glm import WRITERS

BUDGET = dict(memory=2**30, workers=2)
SUBSTITUTES = {"tokenizer.json": "{}", "chat_template.jinja": "{{ x }}", "generation_config.json": "{}", "modeling_own.py": "x = 1\n"}


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


def digests(path: Path) -> dict[str, str]:
    return {str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(path.rglob("*")) if f.is_file()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    home, made = tmp_path_factory.mktemp("convert"), {}

    def write(path: Path, kind: str) -> None:
        if kind == "deepseek_v3":
            write_deepseek(path, 3, mtp=True)
        elif kind == "qwen3_moe":
            write_qwen3_moe(path)
        elif kind in WRITERS:
            write_random(path, WRITERS[kind]())
        else:
            tiny(kind).save_pretrained(path)

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = home / kind
            write(made[kind], kind)
            for name, text in SUBSTITUTES.items():
                (made[kind] / name).write_text(text)
        return made[kind]

    return get


@pytest.mark.parametrize("cut_small", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "llama", "mixtral", "qwen2_moe", "glm4_moe", "minimax_m2", "gpt_oss"])
def test_there_and_back(models, tmp_path, monkeypatch, kind, cut_small):
    """Every tensor bit for bit and in its dtype, prediction layers and their copies too, and every file that goes with a model."""
    if cut_small:
        monkeypatch.setattr(boxes, "CHUNK", 1000)
    path = models(kind)
    middle = hf_to_megatron.convert(path, tmp_path / "m", **BUDGET)
    back = megatron_to_hf.convert(middle, tmp_path / "h", **BUDGET)
    assert same(tensors_of(back), tensors_of(path))
    for where in (middle, back):
        assert all((where / name).read_text() == text for name, text in SUBSTITUTES.items())
    config = json.loads((path / "config.json").read_text())
    assert json.loads((middle / "config.json").read_text()) == config
    assert json.loads((back / "config.json").read_text()) == config | config_of(read_arch(path)) | {"dtype": "float32"}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_fused_experts_come_out_in_the_hubs_spelling(models, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(models(kind), dtype=torch.float32).save_pretrained(tmp_path / "fused", save_original_format=False)
    middle = hf_to_megatron.convert(tmp_path / "fused", tmp_path / "m", **BUDGET)
    assert same(tensors_of(megatron_to_hf.convert(middle, tmp_path / "h", **BUDGET)), tensors_of(models(kind)))


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_float8_source(models, tmp_path, dtype):
    """Scales in another file than their weights; the float32 product, rounded once; float32 tensors stay what they are."""
    plain = write_float8(models("deepseek_v3"), tmp_path / "fp8")
    back = megatron_to_hf.convert(hf_to_megatron.convert(tmp_path / "fp8", tmp_path / "m", dtype=dtype, **BUDGET), tmp_path / "h", **BUDGET)
    scaled = {n.removesuffix("_scale_inv") for n in tensors_of(tmp_path / "fp8") if n.endswith("_scale_inv")}
    want = {n: t.to(torch.bfloat16) if n in scaled and dtype is None else t for n, t in plain.items()}
    found = tensors_of(back)
    assert len(scaled) > 100 and set(found) == set(want) and all(torch.equal(found[n], want[n]) for n in want)
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_mxfp4_source(models, tmp_path):
    want = write_mxfp4(models("gpt_oss"), tmp_path / "packed", scales=(110, 130))
    back = megatron_to_hf.convert(hf_to_megatron.convert(tmp_path / "packed", tmp_path / "m", **BUDGET), tmp_path / "h", **BUDGET)
    found = tensors_of(back)
    assert want and all(torch.equal(found[name], tensor.to(torch.bfloat16)) for name, tensor in want.items())


def test_a_cast_leaves_selection_biases_in_float32(models, tmp_path):
    middle = hf_to_megatron.convert(models("deepseek_v3"), tmp_path / "m", dtype="bfloat16", **BUDGET)
    found = tensors_of(megatron_to_hf.convert(middle, tmp_path / "h", **BUDGET))
    for name, tensor in tensors_of(models("deepseek_v3")).items():
        assert torch.equal(found[name], tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()), name
    assert json.loads((tmp_path / "h" / "config.json").read_text())["dtype"] == "bfloat16"


def test_float8_output(models, tmp_path):
    """DeepSeek's own selection of matrices, readable, within the format's error, and the same again when written from what was read."""
    middle = hf_to_megatron.convert(models("deepseek_v3"), tmp_path / "m", **BUDGET)
    out = megatron_to_hf.convert(middle, tmp_path / "fp8", fp8_block=True, **BUDGET)
    stored, plain = tensors_of(out), tensors_of(models("deepseek_v3"))
    small = {n for n, t in stored.items() if t.dtype == torch.float8_e4m3fn}
    assert small == {n for n in plain if n.endswith(("_proj.weight", "_proj_with_mqa.weight")) and "eh_proj" not in n}
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    for name in small:
        value = fp8.dequantize(stored[name], stored[name + "_scale_inv"])
        assert ((value - plain[name]).abs() <= plain[name].abs() / 16 + plain[name].abs().max() * 2**-15).all(), name
    assert all(torch.equal(stored[n], plain[n]) for n in set(plain) - small)
    read = hf_to_megatron.convert(out, tmp_path / "m2", dtype="float32", **BUDGET)
    again = tensors_of(megatron_to_hf.convert(read, tmp_path / "again", fp8_block=True, **BUDGET))
    assert all(torch.equal(again[n].float(), stored[n].float()) for n in small)
    qwen = hf_to_megatron.convert(models("qwen3_moe"), tmp_path / "q", **BUDGET)
    with pytest.raises(ModelError, match="--fp8-block: not for qwen3_moe"):
        megatron_to_hf.convert(qwen, tmp_path / "x", fp8_block=True, **BUDGET)


@pytest.mark.parametrize("largest", [1e30, 1e37])
def test_float8_numbers(largest):
    """Every code with scales of every size, in boxes that begin anywhere: the bits of the float32 product; NaN stays NaN."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(300, 2)[:, :500].contiguous().view(torch.float8_e4m3fn)
    scale = torch.tensor([[1e-9, 3e-4, 1.0, 7e3], [1e-38, 2.0**-126, 0.1, largest], [5e-41, 1e-3, 1e-2, 1.5]])
    whole = codes.float() * scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :500]
    for rows, columns in ((slice(0, 300), slice(0, 500)), (slice(37, 201), slice(100, 333)), (slice(255, 257), slice(127, 129))):
        for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
            found = fp8.dequantize(codes[rows, columns], scale, corner=(rows.start, columns.start), dtype=dtype)
            want = whole[rows, columns].to(dtype)
            assert torch.equal(found.isnan(), want.isnan())
            assert torch.equal(found.view(bits)[~want.isnan()], want.view(bits)[~want.isnan()])


# ---- restarts, budgets, hosts


def big(path: Path, layers: int = 8) -> Path:
    """A llama of some 250 MB with distinct random numbers, in two files."""
    write_random(path, _llama(layers))
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    (path / "model.safetensors").unlink()
    for i in range(2):
        save_file({n: tensors[n].bfloat16() for n in names[i::2]}, path / f"model-{i}.safetensors")
    return path


def _llama(layers: int):
    from transformers import LlamaConfig

    return LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=4,
                       vocab_size=20000, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return big(tmp_path_factory.mktemp("large") / "model")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "checkpoint_tools.hf_to_megatron", *arguments]


def test_killed_anywhere_it_goes_on(large, tmp_path):
    """SIGKILL with 0, 1, 4 and 9 files written: what is there stays, the end is byte for byte that of a run that was never stopped."""
    want = digests(hf_to_megatron.convert(large, tmp_path / "want", **BUDGET))
    out, part = tmp_path / "out", tmp_path / "out.partial"
    for files in (0, 1, 4, 9):
        process = subprocess.Popen(command("--hf", str(large), "--out", str(out), "--workers", "1"), stderr=subprocess.DEVNULL)
        while process.poll() is None and not (len(list(part.glob("*.distcp"))) >= files and list(part.glob("*.writing-*"))):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not out.exists() and not (part / ".metadata").exists()
        before = {f: f.stat().st_mtime_ns for f in part.glob("*.distcp")}
    assert len(before) >= 9
    hf_to_megatron.convert(large, out, **BUDGET)
    assert digests(out) == want and not part.exists()
    assert all((out / f.name).stat().st_mtime_ns == at for f, at in before.items()), "finished files were written again"


def test_another_conversion_in_the_way(large, models, tmp_path, monkeypatch):
    """What an unfinished conversion left is only gone on with by the same one, and by one at a time."""
    process = subprocess.Popen(command("--hf", str(large), "--out", str(tmp_path / "out"), "--workers", "1"), stderr=subprocess.DEVNULL)
    while not list((tmp_path / "out.partial").glob("*.writing-*")):
        time.sleep(0.002)
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(output, "PATIENCE_S", 1)
    with pytest.raises(ModelError, match="another conversion is writing there"):
        hf_to_megatron.convert(large, tmp_path / "out", **BUDGET)
    monkeypatch.undo()
    process.kill()
    process.wait()
    with pytest.raises(ModelError, match="left from another conversion"):
        hf_to_megatron.convert(models("llama"), tmp_path / "out", **BUDGET)
    hf_to_megatron.convert(large, tmp_path / "out", **BUDGET)


def test_killed_before_the_first_and_after_the_last_byte(models, tmp_path):
    """While it claims the directory, and when all is there but the directory's name."""
    path, out, part = models("qwen3_moe"), tmp_path / "out", tmp_path / "out.partial"
    part.mkdir()
    (part / f"{output.PLAN}.elsewhere.77").write_text("{")
    want = digests(hf_to_megatron.convert(path, tmp_path / "want", **BUDGET))
    hf_to_megatron.convert(path, out, **BUDGET)
    assert {n: d for n, d in digests(out).items() if "elsewhere" not in n} == want
    shutil.copytree(tmp_path / "want", tmp_path / "again.partial")
    (tmp_path / "again.partial" / "__0_0.distcp.writing-host-1").write_text("half")
    hf_to_megatron.convert(path, tmp_path / "again", **BUDGET)
    assert digests(tmp_path / "again") == want


def test_what_is_complete_is_left_as_it_is(models, tmp_path):
    """The same conversion once more, or a host that comes when the others are done, changes nothing; another one is refused."""
    path, out = models("qwen3_moe"), tmp_path / "out"
    hf_to_megatron.convert(path, out, **BUDGET)
    before = {f: f.stat().st_mtime_ns for f in out.iterdir()}
    for share in ((0, 1), (1, 2), (19, 20)):
        assert hf_to_megatron.convert(path, out, share=share, **BUDGET) == out
    assert {f: f.stat().st_mtime_ns for f in out.iterdir()} == before and not (tmp_path / "out.partial").exists()
    with pytest.raises(ModelError, match="exists and is not an empty directory"):
        hf_to_megatron.convert(path, out, dtype="bfloat16", **BUDGET)


def test_many_hosts_claim_at_once(tmp_path):
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(4) as pool:
        for i in range(40):
            part = tmp_path / str(i)
            assert list(pool.map(output._claim, [part] * 4, [{"x": 1}] * 4)) == [None] * 4
            assert [f.name for f in part.iterdir()] == [output.PLAN]


def test_two_hosts_write_one_checkpoint(large, tmp_path):
    want = digests(hf_to_megatron.convert(large, tmp_path / "want", **BUDGET))
    line = command("--hf", str(large), "--out", str(tmp_path / "out"))
    hosts = [subprocess.Popen([*line, "--share", f"{i}/2"], stderr=subprocess.DEVNULL) for i in (0, 1)]
    assert [host.wait(120) for host in hosts] == [0, 0]
    assert digests(tmp_path / "out") == want


def slurm_nodes() -> int:
    if shutil.which("sinfo") is None:
        return 0
    answer = subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%D"], capture_output=True, text=True)
    return int(answer.stdout.strip() or 0) if answer.returncode == 0 else 0


@pytest.mark.skipif(slurm_nodes() < 2, reason="needs two idle Slurm nodes")
def test_two_slurm_nodes(large, tmp_path):
    """`sbatch launch/convert.sh`: each node writes its share."""
    want = digests(hf_to_megatron.convert(large, tmp_path / "want", **BUDGET))
    root = Path(__file__).parent.parent
    environment = os.environ | {"MOERL": f"env PYTHONPATH={root} {sys.executable} -m moerl.cli"}
    line = ["sbatch", "--wait", "--nodes=2", f"--output={tmp_path}/log", str(root / "launch/convert.sh"), "--hf", str(large)]
    subprocess.run([*line, "--workers", "1", "--out", str(tmp_path / "out")], check=True, env=environment, cwd=tmp_path)
    assert digests(tmp_path / "out") == want
    assert "this host's share" in (tmp_path / "log").read_text()


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
def test_a_worker_stays_in_its_budget(large, tmp_path):
    """Peak resident memory of the whole process and its workers, at the least budget there is, below budget + 400 MB: tensors larger than
    what is held at once, and a cast that doubles them."""
    large = shutil.copytree(large, tmp_path / "wide")
    tensors = {"model.embed_tokens.weight": torch.ones(100000, 1024, dtype=torch.bfloat16), "lm_head.weight": None}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    for file in large.glob("*.safetensors"):
        kept = {n: t for n, t in load_file(file).items() if n not in tensors}
        save_file(kept, file)
    save_file(tensors, large / "tables.safetensors")
    config = json.loads((large / "config.json").read_text())
    (large / "config.json").write_text(json.dumps(config | {"vocab_size": 100000}))
    for tool, flag, source, out in (("hf_to_megatron", "--hf", large, "m"), ("megatron_to_hf", "--ckpt", tmp_path / "m", "h")):
        line = [sys.executable, "-m", f"checkpoint_tools.{tool}", flag, str(source), "--out", str(tmp_path / out), "--max-memory", "512MiB"]
        line += ["--dtype", "float32" if out == "m" else "bfloat16"]
        process, peaks = subprocess.Popen(line, stderr=subprocess.DEVNULL), {}
        while process.poll() is None:
            for pid in (process.pid, *_children(process.pid)):
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                    peaks[pid] = int(status.split("VmHWM:")[1].split()[0]) * 1024
                except (OSError, IndexError):
                    continue
            time.sleep(0.01)
        assert process.returncode == 0 and len(peaks) > 1
        assert max(peaks.values()) < 2**29 + 400e6, peaks
    with pytest.raises(ModelError, match="--max-memory 100 MiB: a worker needs 512 MiB"):
        hf_to_megatron.convert(large, tmp_path / "x", memory=100 * 2**20, workers=1)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


# ---- bad input


def broken(models, tmp_path, change) -> Path:
    path = tmp_path / "model"
    shutil.copytree(models("qwen3_moe"), path)
    change(path)
    return path


def cut_short(path):
    with open(path / "model.safetensors", "r+b") as file:
        file.truncate(os.path.getsize(path / "model.safetensors") - 10)


def no_header(path):
    (path / "model.safetensors").write_bytes(b"\xff" * 100)


def rewritten(change):
    def apply(path):
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return apply


def index(path, **more):
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors") | more}))


def split(path):
    tensors = load_file(path / "model.safetensors")
    index(path)
    save_file({NORM: tensors.pop(NORM)}, path / "b.safetensors")
    save_file(tensors, path / "model.safetensors")


NORM = "model.layers.2.input_layernorm.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"
DOWN = "model.layers.0.mlp.experts.0.down_proj.weight"
BAD = {
    "cut short": (cut_short, r"model.safetensors: not a readable safetensors file \(tensor .* ends at byte \d+ of \d+: the file is cut"),
    "no header": (no_header, r"model.safetensors: not a readable safetensors file"),
    "file missing": (lambda p: index(p, x="gone.safetensors"), r"names files that do not exist: gone.safetensors"),
    "no index": (lambda p: (p / "model.safetensors.index.json").write_text("[]"), r"index.json: not an index of safetensors files"),
    "not in its file": (split, rf"index.json: tensor {NORM} is not in model.safetensors, where the index has it"),
    "not in the index": (lambda p: (index(p), save_file({NORM: torch.zeros(64)}, p / "b.safetensors"), index(p, x="b.safetensors")),
                         rf"tensor {NORM} is in b.safetensors, where the index does not have it"),
    "no number": (rewritten(lambda t: t.update({NORM: torch.zeros(64, dtype=torch.int64)})), rf"tensor {NORM} is I64; of plain"),
    "expert's dtype": (rewritten(lambda t: t.update({DOWN: t[DOWN].half()})), r"the parts of \S+linear_fc2.weight are of different dtypes"),
    "in two files": (lambda p: shutil.copy(p / "model.safetensors", p / "more.safetensors"), r"is in both model.safetensors and more"),
    "missing": (rewritten(lambda t: t.pop(NORM)), rf"missing tensor {NORM} \(64,\)"),
    "unknown": (rewritten(lambda t: t.update(x=torch.zeros(2))), r"unexpected tensor x in model.safetensors"),
    "shape": (rewritten(lambda t: t.update({NORM: torch.zeros(63)})), rf"tensor {NORM} has shape \(63,\), expected \(64,\)"),
    "dtypes": (rewritten(lambda t: t.update({KEY: t[KEY].half()})), rf"{KEY}.* are of different dtypes \(torch.float16, torch.float32\)"),
    "no config": (lambda p: (p / "config.json").unlink(), r"config.json is missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_source(models, tmp_path, name):
    """One line that names file and tensor, exit code 1, and nothing written."""
    change, message = BAD[name]
    path = broken(models, tmp_path, change)
    answer = CliRunner().invoke(app, ["convert", "--hf", str(path), "--out", str(tmp_path / "out")])
    assert answer.exit_code == 1 and answer.stderr.startswith("error: ") and "Traceback" not in answer.stderr
    assert re.search(message, answer.stderr), answer.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_bad_mxfp4(models, tmp_path):
    write_mxfp4(models("gpt_oss"), tmp_path / "packed", scales=(110, 130))
    file = next((tmp_path / "packed").glob("*.safetensors"))
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("_scales"))
    save_file(tensors | {name: tensors[name][..., :1].contiguous()}, file)
    with pytest.raises(ModelError, match=r"_blocks and _scales are U8 \[.*\] and U8 \[.*\], MXFP4 is"):
        hf_to_megatron.convert(tmp_path / "packed", tmp_path / "m", **BUDGET)


def test_bad_output(models, tmp_path, monkeypatch):
    path = models("qwen3_moe")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(ModelError, match="full: exists and is not an empty directory; nothing was changed"):
        hf_to_megatron.convert(path, tmp_path / "full", **BUDGET)
    assert [f.name for f in (tmp_path / "full").iterdir()] == ["mine"]
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "mine").write_text("x")
    with pytest.raises(ModelError, match="is in the way and not left from a conversion"):
        hf_to_megatron.convert(path, tmp_path / "a", **BUDGET)
    with pytest.raises(StreamError, match=r"/proc/nothing\S*: cannot be written \("):
        hf_to_megatron.convert(path, Path("/proc/nothing/out"), **BUDGET)
    monkeypatch.chdir(tmp_path / "full")
    with pytest.raises(ModelError, match="full: is the current directory; give a directory inside it"):
        hf_to_megatron.convert(path, Path("."), **BUDGET)
    with pytest.raises(ModelError, match="/: is mounted"):
        hf_to_megatron.convert(path, Path("/"), **BUDGET)
    (tmp_path / "empty").mkdir()
    hf_to_megatron.convert(path, tmp_path / "empty", **BUDGET)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(10**12, 10**12, 1000))
    with pytest.raises(ModelError, match=r"GB more are to be written, 0.00 GB are free"):
        hf_to_megatron.convert(path, tmp_path / "b", **BUDGET)


def test_a_disk_that_fills_up(large, tmp_path):
    """The worker's error names the file; what was finished stays for the next run."""
    limit = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (2**20,) * 2)"
    code = f"import resource, signal; {limit}; from moerl.cli import app; app()"
    line = [sys.executable, "-c", code, "convert", "--hf", str(large), "--out", str(tmp_path / "out")]
    answer = subprocess.run(line, capture_output=True, text=True)
    assert answer.returncode == 1 and re.search(r"error: \S+distcp.writing-\S+: cannot be written \(File too large\)\n", answer.stderr)
    assert not (tmp_path / "out").exists()
    hf_to_megatron.convert(large, tmp_path / "out", **BUDGET)


def test_bad_megatron_checkpoints(models, tmp_path):
    good = hf_to_megatron.convert(models("qwen3_moe"), tmp_path / "good", **BUDGET)

    def refused(change, message):
        bad = tmp_path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        change(bad)
        with pytest.raises(ModelError, match=message):
            megatron_to_hf.convert(bad, tmp_path / "h", **BUDGET)
        assert not (tmp_path / "h").exists()

    refused(lambda p: (p / "__1_0.distcp").unlink(), r"__1_0.distcp: missing, its tensors end at byte \d+")
    refused(lambda p: os.truncate(p / "__1_0.distcp", 100), r"__1_0.distcp: 100 bytes long, its tensors end at byte")
    refused(lambda p: (p / ".metadata").write_bytes(b"x"), r"\.metadata: not readable as the metadata")
    refused(lambda p: (p / "config.json").unlink(), r"config.json is missing; name a directory that has the model's with --hf")
    refused(lambda p: (p / ".metadata").unlink(), r"neither a Megatron distributed checkpoint nor a")
    other = json.loads((good / "config.json").read_text()) | {"moe_intermediate_size": 48}
    wrong = r"linear_fc1.weight has shape \(8, 64, 64\), expected \(8, 96, 64\)"
    refused(lambda p: (p / "config.json").write_text(json.dumps(other)), wrong)
    fewer = json.loads((good / "config.json").read_text()) | {"num_hidden_layers": 3}
    refused(lambda p: (p / "config.json").write_text(json.dumps(fewer)), r"unexpected tensor decoder.layers.3")


# ---- audit and inspect


def run(*arguments) -> tuple[int, str]:
    answer = CliRunner().invoke(app, list(map(str, arguments)))
    return answer.exit_code, answer.stdout + answer.stderr


def test_audit(models, tmp_path):
    """The same whatever the format; a single changed element, a missing layer and another model are each named."""
    path = models("deepseek_v3")
    middle = hf_to_megatron.convert(path, tmp_path / "m", **BUDGET)
    code, text = run("audit", path, middle)
    sums = [line.split("sha256 ")[1] for line in text.splitlines() if "sha256" in line]
    assert code == 0 and "\nthe same" in text and len(sums) == 2 and sums[0] == sums[1]
    assert f"{len(read_names(path))} tensors" in text

    tensors = tensors_of(path)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    tensors[name][3, 4] += 0.5
    other = save(tmp_path / "other", path, tensors)
    code, text = run("audit", middle, other)
    assert code == 1 and f"differs: {name}: 1 of 2048 elements, by at most 0.5" in text and text.count("differs:") == 1

    without = save(tmp_path / "without", path, {n: t for n, t in tensors_of(path).items() if not n.startswith("model.layers.4.")})
    code, text = run("audit", path, without)
    assert code == 1 and f"model.layers.4.eh_proj.weight is not in {without}" in text
    code, text = run("audit", path, models("qwen3_moe"))
    assert code == 1 and "are different models: family, " in text
    code, text = run("audit", path, tmp_path)
    assert code == 1 and "neither a Hugging Face nor a Megatron checkpoint" in text


def test_audit_sees_value_heads_and_second_copies(models, tmp_path):
    tensors = tensors_of(models("qwen3_moe"))
    tensors.pop("lm_head.weight")
    one, two = ({**tensors, "score.weight": torch.full((1, 64), value)} for value in (1.0, 2.0))
    a, b = save(tmp_path / "a", models("qwen3_moe"), one), save(tmp_path / "b", models("qwen3_moe"), two)
    assert run("audit", a, a)[0] == 0
    code, text = run("audit", a, b)
    assert code == 1 and "differs: the value head" in text
    tensors = tensors_of(models("llama"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    code, text = run("audit", models("llama"), save(tmp_path / "c", models("llama"), tensors))
    assert code == 1 and "differs: lm_head.weight" in text


def test_boxes_are_runs_of_whole_scale_rows(models):
    """A cut of a matrix that is written with a scale a block falls between blocks."""
    param = params_of(read_arch(models("deepseek_v3")))["decoder.layers.0.mlp.linear_fc1.weight"]
    shape = (2, 18432, 7168)
    found = list(boxes.cut(param, shape, 2, 128))
    assert len(found) >= 8 and all(boxes.is_run(shape, box) for box in found)
    assert all(b[1].start % 128 == 0 and (b[1].stop - b[1].start) * 7168 * 2 <= boxes.CHUNK for b in found)
    assert sum((b[0].stop - b[0].start) * (b[1].stop - b[1].start) for b in found) == 2 * 18432


def save_job(rank, layout, path, directory):
    from moerl.megatron import checkpoint

    checkpoint.save(jobs.make(rank, layout, path, train=False), directory)


def test_a_table_padded_for_more_ranks(ranks, models, tmp_path):
    """Saved at TP4 the vocabulary has 512 rows, of which the model has 131."""
    ranks.run(ParallelLayout(tp=4, ep=4), save_job, str(models("deepseek_v3")), str(tmp_path / "saved"))
    assert torch_dist.read_metadata(tmp_path / "saved")["output_layer.weight"].shape[0] == 512
    back = megatron_to_hf.convert(tmp_path / "saved", tmp_path / "h", hf=models("deepseek_v3"), **BUDGET)
    want = tensors_of(models("deepseek_v3"))
    found = tensors_of(back)
    assert all(torch.equal(found[n], want[n]) for n in found) and set(want) - set(found) == set(duplicates_of(models("deepseek_v3")))


def duplicates_of(path: Path) -> list[str]:
    return open_source(path).copies


def read_names(path: Path) -> set[str]:
    params = params_of(read_arch(path)).values()
    return {piece.name for param in params if not param.tied for piece in param.pieces}


def save(out: Path, like: Path, tensors: dict[str, torch.Tensor]) -> Path:
    out.mkdir()
    (out / "config.json").write_bytes((like / "config.json").read_bytes())
    save_file(tensors, out / "model.safetensors")
    return out


def test_audit_of_float8_and_its_conversion(models, tmp_path):
    write_float8(models("deepseek_v3"), tmp_path / "fp8")
    for dtype in (None, "float32"):
        middle = hf_to_megatron.convert(tmp_path / "fp8", tmp_path / f"m {dtype}", dtype=dtype, **BUDGET)
        assert run("audit", tmp_path / "fp8", middle)[0] == 0
        assert run("audit", middle, tmp_path / "fp8")[0] == 0


def test_inspect(models, tmp_path):
    path = models("deepseek_v3")
    middle = hf_to_megatron.convert(path, tmp_path / "m", **BUDGET)
    code, text = run("inspect", path, "--only", "layers.1.mlp.experts.0.")
    assert code == 0 and "Hugging Face checkpoint, model_type deepseek_v3" in text and "3 tensors F32, 6,144 elements" in text
    assert "model.layers.1.mlp.experts.0.down_proj.weight  F32" in text and "[64, 32]" in text
    code, text = run("inspect", middle, "--only", "layers.1.mlp.experts")
    assert code == 0 and "converted, of no layout" in text
    assert "decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in text and "[16, 64, 64]" in text


def test_sizes_and_shares():
    import typer

    from checkpoint_tools.cli import share, size

    assert [size(text) for text in ("8GiB", "500 MB", "1.5G", "1024")] == [2**33, 500 * 10**6, 1500 * 10**6, 1024]
    assert share("1/4") == (1, 4)
    for wrong in ("4/4", "a/b", "1"):
        with pytest.raises(typer.BadParameter):
            share(wrong)
    with pytest.raises(typer.BadParameter, match="'8 apples' is not a size"):
        size("8 apples")


def test_the_engines_reader_reads_both_formats(models, tmp_path):
    """One parameter's box out of either format, with rows beyond the vocabulary as zeros."""
    path = models("llama")
    middle = hf_to_megatron.convert(path, tmp_path / "m", **BUDGET)
    a, b = open_source(path), open_source(middle)
    param = a.params["embedding.word_embeddings.weight"]
    for box in ((slice(100, 140), slice(3, 40)), (slice(250, 384), slice(0, 48))):
        assert torch.equal(a.read(param, box), b.read(param, box))
    assert a.read(param, (slice(131, 200), slice(0, 48))).abs().max() == 0
    assert HFReader(path).files and not a.copies
