from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.config.load import ConfigError, dump, load
from moerl.config.schema import SFTConfig, TrainConfig

TRAIN = """
model: {path: models/start, dtype: float32}
data:
  prompts: reasoning_gym:chain_sum
  options: {min_terms: 2, max_terms: 2}
  size: ${trainer.steps}00
rollout: {prompts_per_step: 8, samples_per_prompt: 4}
actor:
  layout: {tp: 2}
  optimizer: {lr: 1e-4, betas: [0.9, 0.99]}
reward: {function: reasoning_gym}
algorithm: {name: grpo, mini_batch: 16}
trainer: {steps: 3, output: runs/demo}
"""


@pytest.fixture
def train(tmp_path):
    """Writes a configuration with some lines changed and loads it."""

    def load_with(*overrides: str, text: str = TRAIN, cls=TrainConfig):
        (tmp_path / "run.yaml").write_text(text)
        return load(tmp_path / "run.yaml", cls, overrides)

    return load_with


def test_file_values_interpolation_and_defaults(train):
    config = train()
    assert config.data.size == 300 and config.data.options == {"min_terms": 2, "max_terms": 2}
    assert config.actor.optimizer.lr == 1e-4 and config.actor.optimizer.betas == (0.9, 0.99)
    assert config.actor.layout.tp == 2 and config.critic.layout is None and config.trainer.seed == 0


def test_overrides_are_yaml_and_come_before_interpolation(train):
    config = train(
        "trainer.steps=7",
        "actor.optimizer.lr=3e-5",
        "actor.optimizer.betas=[0.8, 0.9]",
        "critic.layout.tp=4",
        "rollout.dtype=null",
        "data.system=be brief, yes=no",
        "data.options.new=[a, {b: 1}]",
    )
    assert config.data.size == 700 and config.actor.optimizer.lr == 3e-5
    assert config.actor.optimizer.betas == (0.8, 0.9) and config.critic.layout.tp == 4 and config.rollout.dtype is None
    assert config.data.options == {"min_terms": 2, "max_terms": 2, "new": ["a", {"b": 1}]}
    assert train("data.options={}").data.options == {}  # an override sets, it does not merge


def test_override_value_with_a_colon_and_a_quoted_text(train):
    assert train('data.system="a: b"').data.system == "a: b"
    assert train("data.system='${x}'".replace("$", "\\$")).data.system == "${x}"


@pytest.mark.parametrize(
    "override, message",
    [
        ("actor.layuot.tp=2", "unknown key actor.layuot; nearest valid key: actor.layout"),
        ("acter.layout.tp=2", "unknown key acter; nearest valid key: actor"),
        ("actor.lr=1e-5", "unknown key actor.lr; nearest valid key: actor.optimizer.lr"),
        ("critic.lr=1e-5", "unknown key critic.lr; nearest valid key: critic.optimizer.lr"),
        ("temperature=0.5", "unknown key temperature; nearest valid key: rollout.sampling.temperature"),
        ("reference.layout.zz=2", "unknown key reference.layout.zz; valid keys there: tp, pp, vpp, ep, etp, cp, dp"),
        ("actor.layout.tp=two", 'actor.layout.tp is "two": must be a valid integer'),
        ("actor.layout.tp=0", "actor.layout.tp is 0: must be greater than or equal to 1"),
        ("model.dtype=float16", "model.dtype is \"float16\": must be 'float32' or 'bfloat16'"),
        ("algorithm.gamma=1.5", "algorithm.gamma is 1.5: must be less than or equal to 1"),
        ("actor.optimizer.betas=[0.9, x]", 'actor.optimizer.betas.1 is "x": must be a valid number'),
        ("actor=3", "actor is 3: must be a group of keys"),
        ("actor=null", "actor is null: must be a group of keys"),
        ("rollout.sampling.top_p=0.9", "rollout.sampling: top_p and top_k must be off"),
        ("rollout.layout.pp=2", "rollout.layout takes tp, ep and dp (number of engines) only, pp given"),
        ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt must be 2 or more for grpo"),
        ("model.path=???", "missing required key model.path"),
        ("data.size=${nowhere}", "data.size: Interpolation key 'nowhere' not found"),
        ("trainer.steps", "override 'trainer.steps' must read key=value"),
        ("=3", "override '=3' must read key=value"),
        ("a..b=3", "override 'a..b=3' must read key=value"),
        ("trainer.steps=[1", "override 'trainer.steps=[1': the value is not valid YAML"),
    ],
)
def test_a_wrong_override_is_one_clear_line(train, override, message):
    with pytest.raises(ConfigError) as error:
        train(override)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_unknown_key_in_the_file(train):
    with pytest.raises(ConfigError, match="^unknown key actor.layuot; nearest valid key: actor.layout$"):
        train(text=TRAIN.replace("  layout:", "  layuot:"))
    with pytest.raises(ConfigError, match="unknown key 'trainer.seed': in a file, keys are nested"):
        train(text=TRAIN + "trainer.seed: 3\n")


def test_every_problem_has_its_line(train):
    with pytest.raises(ConfigError) as error:
        train("actor.layout.tp=0", "trainer.stpes=1", text=TRAIN.replace("reward:", "rewrad:"))
    assert sorted(str(error.value).split("\n")) == [
        "actor.layout.tp is 0: must be greater than or equal to 1",
        "missing required key reward.function",
        "unknown key rewrad; nearest valid key: reward",
        "unknown key trainer.stpes; nearest valid key: trainer.steps",
    ]


def test_missing_keys_of_an_empty_file(train):
    with pytest.raises(ConfigError) as error:
        train(text="", cls=SFTConfig)
    wanted = ["model.path", "data.prompts", "trainer.steps", "trainer.output"]
    assert str(error.value).split("\n") == [f"missing required key {key}" for key in wanted]


def test_file_errors(tmp_path, train):
    with pytest.raises(ConfigError, match=r"nothing.yaml does not exist$"):
        load(tmp_path / "nothing.yaml", TrainConfig)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path, TrainConfig)
    with pytest.raises(ConfigError, match=r"run.yaml, line 3, column \d+: "):
        train(text="model: {path: a}\ndata: [1, 2\ntrainer: {}\n")
    with pytest.raises(ConfigError, match=r"run.yaml, line 2, column 1: found duplicate key model$"):
        train(text="model: {path: a}\nmodel: {path: b}\n")
    with pytest.raises(ConfigError, match="must hold keys and values, not a list"):
        train(text="- 1\n")


def test_dump_round_trips(tmp_path, train):
    config = train("critic.layout.ep=2")
    (tmp_path / "again.yaml").write_text(dump(config))
    assert load(tmp_path / "again.yaml", TrainConfig) == config
    sft = train(text=_sft_text(), cls=SFTConfig)
    (tmp_path / "again.yaml").write_text(dump(sft))
    assert load(tmp_path / "again.yaml", SFTConfig) == sft


def _sft_text() -> str:
    return re.sub(r"^(rollout|reward|algorithm):.*\n", "", TRAIN, flags=re.M)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8"))
KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
TEXTS = st.text(alphabet="${}\\ab:'\"#\n-1e.", max_size=12)


@settings(deadline=None, max_examples=60)
@given(system=TEXTS, options=st.dictionaries(KEYS, SCALARS | st.lists(TEXTS, max_size=3)))
def test_any_text_survives_dump_and_load(tmp_path_factory, system, options):
    if "???" in (system, *map(str, options.values())):
        return
    config = SFTConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"prompts": "p.jsonl", "system": system, "options": options},
            "trainer": {"steps": 1, "output": "o"},
        }
    )
    path = tmp_path_factory.mktemp("dump") / "run.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path, SFTConfig) == config
