"""moerl: reinforcement-learning post-training of mixture-of-experts models on Megatron-core and vLLM."""

__version__ = "0.1.0"
