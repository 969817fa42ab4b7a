"""One pass over a rank's micro-batches: scores (log-probs, entropies, values) or gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from moerl.megatron.batch import MicroBatch, pack, packed_length
from moerl.sample import Sample

# What the last stage makes of one micro-batch's output: a loss to differentiate (already divided by the global denominator) and results.
Head = Callable[[Tensor, MicroBatch], tuple[Tensor, dict]]


def response_stats(vocab: int, temperature: float, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy [r] of the response tokens from this rank's logits [1, t, vocabulary / tp]."""
    from moerl.megatron.logprob import token_stats

    group = parallel_state.get_tensor_model_parallel_group()
    return token_stats(output[0][batch.at], batch.target, vocab, temperature, group)


def logprob_head(vocab: int, temperature: float) -> Head:
    def head(output: Tensor, batch: MicroBatch) -> tuple[Tensor, dict]:
        logp, entropy = response_stats(vocab, temperature, output, batch)
        return logp.sum() * 0, {"logp": logp.cpu(), "entropy": entropy.cpu(), "responses": batch.responses}

    return head


def value_head(output: Tensor, batch: MicroBatch) -> tuple[Tensor, dict]:
    values = output[0, :, 0][batch.at]
    return values.sum() * 0, {"values": values.cpu(), "responses": batch.responses}


def run(chunks: list[torch.nn.Module], micro_batches: list[list[Sample]], head: Head, *, align: int, train: bool,
        before: Callable[[MicroBatch], None] | None = None) -> list[dict]:
    """Run Megatron's schedule over the micro-batches; gradients accumulate in the chunks when `train`. `before` is told of every
    forward pass.

    Returns the head's results, one a micro-batch in order ({} for one without samples), on the last pipeline stage; an empty list
    elsewhere.
    """
    device = torch.cuda.current_device()
    sizes = [packed_length(samples, align) for samples in micro_batches]
    if len(chunks) > 1:
        # The interleaved schedule has messages of both directions under way between the same two ranks: one size for all.
        sizes = [max(sizes)] * len(sizes)
    packed = [pack(samples, size, device) for samples, size in zip(micro_batches, sizes)]

    def forward_step(batches, chunk):
        batch: MicroBatch = next(batches)
        if before:
            before(batch)
        output = chunk(batch.tokens, batch.positions, None, packed_seq_params=batch.packed)

        def loss(output: Tensor):
            # A placeholder has no response tokens: nothing to add to the loss, but its backward pass takes part in every collective.
            value, results = head(output, batch) if batch.responses else (output.sum() * 0, {})
            return value, torch.zeros((), dtype=torch.int, device=value.device), results

        return output, loss

    for chunk in chunks:
        chunk.train(train)
    with torch.set_grad_enabled(train):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(packed) for _ in chunks] if len(chunks) > 1 else iter(packed),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(packed),
            seq_length=sizes[0],
            micro_batch_size=1,
            forward_only=not train,
        )
