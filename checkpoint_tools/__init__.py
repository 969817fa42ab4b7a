"""Tools on checkpoints, for one CPU host or many: convert between Hugging Face and Megatron, compare, list."""
