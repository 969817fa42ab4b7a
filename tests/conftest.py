from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def ranks():
    from tests.ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Models to convert, by family, written when first asked for."""
    from tests.convert_helpers import write_model

    home, made = tmp_path_factory.mktemp("convert"), {}

    def get(kind: str):
        if kind not in made:
            made[kind] = write_model(home / kind, kind)
        return made[kind]

    return get


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    from tests.convert_helpers import big

    return big(tmp_path_factory.mktemp("large") / "model")


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory):
    """A random Qwen3-MoE of transformers' own class, float32, with every special case a map can get wrong; vocabulary not even."""
    from tests.models import write_qwen3_moe

    return write_qwen3_moe(tmp_path_factory.mktemp("models") / "moe")
