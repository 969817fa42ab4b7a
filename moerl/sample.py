"""What the driver sends to a rank: one ragged sequence and the numbers that belong to its response tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Sample:
    """Prompt then response. `fields` hold one float a response token (old log-probs, advantages, weights, ...)."""

    tokens: np.ndarray
    prompt: int
    fields: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def response(self) -> int:
        return len(self.tokens) - self.prompt
