"""The commands on checkpoints: `moerl convert|audit|inspect`, and the same by module (`python -m checkpoint_tools.audit`)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from moerl.user_errors import user_errors

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
DTYPES = ("bfloat16", "float16", "float32")


def size(text: str) -> int:
    """Bytes of "8GiB", "500 MB" and the like."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", text, re.IGNORECASE)
    unit = match and match[2].upper()
    if not match or (unit if unit in UNITS else unit + "B") not in UNITS:
        raise typer.BadParameter(f"{text!r} is not a size (8GiB, 500MB)")
    return int(float(match[1]) * UNITS[unit if unit in UNITS else unit + "B"])


def share(text: str) -> tuple[int, int]:
    """Host i of n from "i/n"; empty: this task's number under srun, or the only host."""
    if not text:
        return int(os.environ.get("SLURM_PROCID", 0)), int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise typer.BadParameter(f"{text!r} is not i/n with i from 0 to n - 1")
    return int(match[1]), int(match[2])


def dtype(text: str) -> str | None:
    if text and text not in DTYPES:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(DTYPES)}")
    return text or None


Out = Annotated[Path, typer.Option(help="directory to write; must not exist or be empty")]
Memory = Annotated[str, typer.Option("--max-memory", metavar="SIZE", help="what all workers of this host may hold together")]
Workers = Annotated[int, typer.Option(min=1, help="processes on this host; fewer are started where the memory is for fewer")]
Cast = Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="cast to it (left out: every tensor keeps its own)")]
Share = Annotated[str, typer.Option("--share", metavar="I/N", help="this is host I of N that write one output (left out: as srun says)")]
Role = Annotated[str, typer.Option(help="which model of a training checkpoint: actor or critic")]
Blocks = Annotated[bool, typer.Option("--fp8-block", help="write DeepSeek's float8 blocks of 128 x 128 with their scales")]
HF = Annotated[Path | None, typer.Option(help="Hugging Face checkpoint; with --ckpt, where its configuration lies if not beside it")]


def _say(written: Path, host: tuple[int, int]) -> None:
    print(written if host[0] == 0 else f"this host's share of {written} is written")


def hf_to_megatron(hf: Annotated[Path, typer.Option(help="Hugging Face checkpoint")], out: Out, max_memory: Memory = "8GiB",
                   workers: Workers = 4, cast: Cast = "", host: Share = "") -> None:
    """Write a Megatron distributed checkpoint of a Hugging Face one; it loads at any layout."""
    with user_errors(OSError):
        from checkpoint_tools.hf_to_megatron import convert as run

        _say(run(hf, out, memory=size(max_memory), workers=workers, dtype=dtype(cast), share=share(host)), share(host))


def megatron_to_hf(ckpt: Annotated[Path, typer.Option(help="Megatron distributed checkpoint, or a step of a training run")], out: Out,
                   hf: HF = None, role: Role = "actor", max_memory: Memory = "8GiB", workers: Workers = 4, cast: Cast = "",
                   fp8_block: Blocks = False, host: Share = "") -> None:
    """Write a Hugging Face checkpoint of a Megatron one."""
    with user_errors(OSError):
        from checkpoint_tools.megatron_to_hf import convert as run

        options = dict(memory=size(max_memory), workers=workers, share=share(host))
        _say(run(ckpt, out, role=role, hf=hf, dtype=dtype(cast), fp8_block=fp8_block, **options), share(host))


def convert(out: Out, hf: HF = None, ckpt: Annotated[Path | None, typer.Option(help="Megatron checkpoint, or a step of a run")] = None,
            role: Role = "actor", max_memory: Memory = "8GiB", workers: Workers = 4, cast: Cast = "", fp8_block: Blocks = False,
            host: Share = "") -> None:
    """Convert a checkpoint: --hf into a Megatron distributed one, --ckpt into a Hugging Face one."""
    if ckpt is not None:
        megatron_to_hf(ckpt, out, hf, role, max_memory, workers, cast, fp8_block, host)
    elif hf is not None and not fp8_block:
        hf_to_megatron(hf, out, max_memory, workers, cast, host)
    else:
        raise typer.BadParameter("--fp8-block goes with --ckpt" if hf else "give --hf or --ckpt")


def audit(a: Annotated[Path, typer.Argument(help="checkpoint of either format, or a step of a run")], b: Annotated[Path, typer.Argument()],
          role: Role = "actor", workers: Workers = 4) -> None:
    """Compare two checkpoints: every element of every tensor, both ways. Exit code 1 where anything differs."""
    with user_errors(OSError):
        from checkpoint_tools.audit import compare

        raise SystemExit(0 if compare(a, b, role=role, workers=workers) else 1)


def inspect(path: Annotated[Path, typer.Argument(metavar="DIR")],
            only: Annotated[str, typer.Option(help="tensors with this in their name")] = "", role: Role = "") -> None:
    """Tensors, shapes, dtypes, sizes, layout and step of a checkpoint of either format."""
    with user_errors(OSError):
        from checkpoint_tools.inspect import describe

        print(describe(path, only, role))
