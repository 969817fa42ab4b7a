"""Even use of experts, where a run asks for it: auxiliary losses of the routers and the update of their biases. Off in RL by default.

Megatron-core's own are left off: they count filler tokens, and their scale assumes a division by the token count that `build._finalize`
leaves out. Here the losses are weighted sums over the tokens of the optimizer step like every other loss, so that the gradient does not
depend on how micro-batches are spread over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor

from moerl.megatron.batch import MicroBatch
from moerl.sample import Sample


@dataclass(frozen=True)
class Balance:
    """Coefficients of the losses and rate of the bias update; 0 is off."""

    aux_loss: float = 0.0
    z_loss: float = 0.0
    bias_update_rate: float = 0.0

    def __bool__(self) -> bool:
        return any(vars(self).values())


class _Attach(torch.autograd.Function):
    """Passes a tensor on; its backward pass starts that of `loss` too."""

    @staticmethod
    def forward(ctx, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=torch.float32, device=grad.device)


class Balancer:
    """The routers of one rank's chunks during optimizer steps; scoring passes and steps of others go by it untouched.

    For the T tokens of a step, in micro-batches of T_m, E experts and k a token, each mixture layer adds
      aux_loss * sum_m T_m / T * E sum_i f_i P_i   (Switch Transformers, Fedus et al. 2021, equations 4 to 6),
      z_loss * mean of logsumexp(logits)^2         (ST-MoE, Zoph et al. 2022, equation 5),
    with f_i the share of the k T_m choices that fell on expert i and P_i its mean probability (sigmoid scores divided by their sum).
    After the step every bias moves by bias_update_rate * sign(mean load - load) of its expert (DeepSeek-V3 technical report, 2.1.2).
    """

    def __init__(self, chunks: list[torch.nn.Module], balance: Balance):
        self.balance, self.real, self.total = balance, None, 0
        self.loads: dict[torch.nn.Module, Tensor] = {}
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                if hasattr(layer.mlp, "router"):
                    self._watch(layer.mlp.router)

    def _watch(self, router: torch.nn.Module) -> None:
        plain = router.routing
        self.loads[router] = None

        def routing(logits: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
            probs, chosen = plain(logits, *args, **kwargs)
            return (self._attach(router, logits.view(-1, logits.shape[-1]), probs, chosen) if self.real else probs), chosen

        router.routing = routing

    def start(self, micro_batches: list[list[Sample]]) -> None:
        """Begin an optimizer step on these micro-batches of this rank."""
        total = torch.tensor(sum(len(s.tokens) for batch in micro_batches for s in batch), device=torch.cuda.current_device())
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        self.total = int(total)
        for router in self.loads:
            self.loads[router] = torch.zeros(router.num_experts, device=total.device)

    def enter(self, batch: MicroBatch) -> None:
        """The next forward pass is that of `batch`."""
        self.real = batch.real

    @torch.no_grad()
    def finish(self) -> None:
        """End the step: move the biases."""
        self.real = None
        if not self.balance.bias_update_rate or not self.loads:
            return
        loads = torch.stack(list(self.loads.values()))
        torch.distributed.all_reduce(loads, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        for router, load in zip(self.loads, loads):
            router.expert_bias += self.balance.bias_update_rate * torch.sign(load.mean() - load)

    def _attach(self, router: torch.nn.Module, logits: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
        rows = len(logits)
        first = rows * parallel_state.get_tensor_model_parallel_rank()  # the sequence is split over tensor-parallel ranks
        mask = (torch.arange(first, first + rows, device=logits.device) < self.real)[:, None]
        counts = (chosen & mask).sum(0).float()
        self.loads[router] += counts
        logits, loss = logits.float(), 0.0
        if self.balance.aux_loss:
            torch.distributed.all_reduce(counts, group=parallel_state.get_tensor_model_parallel_group())
            scores = logits.sigmoid() if router.score_function == "sigmoid" else logits.softmax(-1)
            scores = scores / scores.sum(-1, keepdim=True)
            share = counts / (router.topk * self.real)
            loss = loss + self.balance.aux_loss * router.num_experts * (share * (scores * mask).sum(0)).sum() / self.total
        if self.balance.z_loss:
            loss = loss + self.balance.z_loss * (logits.logsumexp(-1, keepdim=True).square() * mask).sum() / self.total
        return _Attach.apply(probs, loss) if torch.is_tensor(loss) else probs
