"""From ragged samples to the packed rows Megatron computes on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from moerl.sample import Sample


@dataclass(frozen=True)
class MicroBatch:
    """Sequences end to end in one row of t tokens, t a multiple of the alignment; a filler sequence makes up the rest.

    `at` [r] are the places of the response tokens' predictions: the logits (or value) at place i belong to token i + 1. `target` [r] are
    those tokens, and every entry of `fields` is [r] in the same order, samples one after another.
    """

    tokens: Tensor
    positions: Tensor
    packed: PackedSeqParams
    at: Tensor
    target: Tensor
    fields: dict[str, Tensor]
    responses: list[int]
    real: int  # tokens before the filler


def packed_length(samples: list[Sample], align: int) -> int:
    """Tokens of the row: a multiple of `align`, at least one."""
    return max(align, -(-sum(len(s.tokens) for s in samples) // align) * align)


def pack(samples: list[Sample], length: int, device: torch.device | str) -> MicroBatch:
    """Pack the samples into a row of `length`; without any, it is all filler: a rank without work takes part in every collective."""
    filler = length - sum(len(s.tokens) for s in samples)
    lengths = [len(s.tokens) for s in samples] + ([filler] if filler else [])
    tokens = np.concatenate([*(s.tokens for s in samples), np.zeros(filler, dtype=np.int64)]).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    at = [np.arange(start + s.prompt - 1, start + len(s.tokens) - 1) for s, start in zip(samples, starts)]
    at = np.concatenate(at).astype(np.int64) if at else np.zeros(0, dtype=np.int64)
    cu = torch.from_numpy(starts).to(device)
    longest = max(lengths)
    names = samples[0].fields if samples else ()
    as_device = lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(device)  # noqa: E731
    return MicroBatch(
        tokens=as_device(tokens)[None],
        positions=as_device(np.concatenate([np.arange(n) for n in lengths]).astype(np.int64))[None],
        packed=PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
        ),
        at=as_device(at),
        target=as_device(tokens[at + 1]) if len(at) else torch.zeros(0, dtype=torch.long, device=device),
        fields={name: as_device(np.concatenate([s.fields[name] for s in samples]).astype(np.float32)) for name in names},
        responses=[s.response for s in samples],
        real=length - filler,
    )
