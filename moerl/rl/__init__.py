"""Reinforcement learning as functions on tensors: no process groups, no input or output.

Each algorithm is a module with NEEDS_CRITIC, advantages(batch, settings) and actor_loss(...), and critic_loss(...) if
it needs a critic; the trainer picks one from ALGORITHMS and knows nothing else of it.
"""

from __future__ import annotations

from moerl.rl import grpo, ppo

ALGORITHMS = {"ppo": ppo, "grpo": grpo}
