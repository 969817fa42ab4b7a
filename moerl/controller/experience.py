"""The rollouts of one step on the driver: ragged responses, what was measured on them, and the samples made of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moerl.rl.aggregate import token_weights
from moerl.rl.batch import Rollouts
from moerl.sample import Sample


@dataclass
class Experience:
    """B responses. Lists are by response; `logp`, `ref_logp`, `values`, `rollout_logp` hold one array of its length for each."""

    samples: list[Sample]
    group: list[int]
    rollout_logp: list[np.ndarray]
    truncated: list[bool]
    rewards: list[float]
    logp: list[np.ndarray] = field(default_factory=list)
    entropy: list[np.ndarray] = field(default_factory=list)
    ref_logp: list[np.ndarray] | None = None
    values: list[np.ndarray] | None = None
    advantages: list[np.ndarray] = field(default_factory=list)
    returns: list[np.ndarray] | None = None

    @property
    def lengths(self) -> list[int]:
        return [s.response for s in self.samples]

    def mask(self) -> Tensor:
        lengths = torch.tensor(self.lengths)
        return (torch.arange(int(lengths.max()))[None] < lengths[:, None]).float()

    def rollouts(self) -> Rollouts:
        """Padded tensors for the algorithm."""
        return Rollouts(
            mask=self.mask(),
            rewards=torch.tensor(self.rewards),
            old_logp=pad(self.logp),
            ref_logp=None if self.ref_logp is None else pad(self.ref_logp),
            values=None if self.values is None else pad(self.values),
            group=torch.tensor(self.group),
        )

    def training_samples(self, indices: list[int], aggregation: str) -> list[Sample]:
        """The samples of one optimizer step with everything their losses read; weights carry this step's denominator."""
        weights = rows(token_weights(self.mask()[indices], aggregation), [self.lengths[i] for i in indices])
        optional = {"ref_logp": self.ref_logp, "values": self.values, "returns": self.returns}
        out = []
        for i, weight in zip(indices, weights):
            fields = {"old_logp": self.logp[i], "advantages": self.advantages[i], "weights": weight}
            fields |= {name: values[i] for name, values in optional.items() if values is not None}
            out.append(Sample(self.samples[i].tokens, self.samples[i].prompt, fields))
        return out


def pad(arrays: list[np.ndarray]) -> Tensor:
    """Ragged arrays -> [B, longest] float32, zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(np.asarray(a, dtype=np.float32)) for a in arrays], batch_first=True)


def rows(tensor: Tensor, lengths: list[int]) -> list[np.ndarray]:
    """[B, R] -> ragged arrays of the given lengths."""
    return [tensor[i, :n].numpy().astype(np.float32) for i, n in enumerate(lengths)]


def token_mean(arrays: list[np.ndarray]) -> float:
    """Mean over all tokens of all responses."""
    return float(np.concatenate(arrays).mean())
