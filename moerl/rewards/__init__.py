"""Rewards: load a user's function or a built-in verifier (load.py), and run it over a batch of samples (score.py)."""
