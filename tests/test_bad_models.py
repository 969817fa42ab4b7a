"""A configuration or checkpoint that cannot be used ends in one line that names the file, the field and the rule."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moerl.models import FAMILIES, read_arch
from moerl.models.arch import ModelError
from moerl.models.known import GROUPS, LISTS, NEUTRAL, NUMBERS, SIZES, SWITCHES
from tests.test_tensormap_properties import SIZES as FIELDS

ROOT = Path(__file__).parent.parent
BASE = {family: FIELDS | dict(model_type=family, num_key_value_heads=4) for family in FAMILIES}
BASE["gpt_oss"]["sliding_window"] = 4
BASE["qwen2_moe"]["shared_expert_intermediate_size"] = 32


def complaint(tmp_path, config) -> list[str]:
    """The lines of the error without the file's name, which each of them begins with."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError) as error:
        read_arch(tmp_path)
    lines = str(error.value).splitlines()
    assert all(line.startswith(f"{file}: ") for line in lines)
    return [line.removeprefix(f"{file}: ") for line in lines]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_of_these_tests_is_good(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps(BASE[family]))
    assert read_arch(tmp_path).layers == 4


@pytest.mark.parametrize("kind", ["falcon", None, ["llama"]])
def test_an_unknown_family_lists_the_known_ones_and_says_how_to_add_one(tmp_path, kind):
    (line,) = complaint(tmp_path, {"model_type": kind})
    assert f"model_type {kind!r} is not supported" in line and all(f in line for f in FAMILIES) and "docs/add_a_family.md" in line
    assert (ROOT / "docs" / "add_a_family.md").is_file()


@pytest.mark.parametrize("text", ["{", "[]", "\x80"])
def test_not_a_configuration(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match="config.json: (not valid JSON|must hold)"):
        read_arch(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_required_fields_are_named(tmp_path, family):
    """Each of the fields without which there is no model, one after another."""
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps", "intermediate_size"):
        config = {k: v for k, v in BASE[family].items() if k != field}
        if family in ("qwen2_moe", "qwen3_moe") and field == "intermediate_size":
            continue  # the width of dense layers, which these need not have
        assert complaint(tmp_path, config) == [f"field '{field}' is missing"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("field", "value", "rule"), [
    ("hidden_size", "64", "must be a whole number"), ("num_hidden_layers", 4.0, "must be a whole number"),
    ("num_attention_heads", None, "must be a whole number"), ("vocab_size", -1, "not negative"),
    ("num_hidden_layers", True, "must be a whole number"),
    ("rms_norm_eps", "1e-6", "must be a number"), ("tie_word_embeddings", "false", "must be true or false"),
    ("rope_scaling", ["yarn", 4.0], "must be a group of fields"), ("rope_parameters", "yarn", "must be a group of fields"),
    ("quantization_config", "fp8", "must be a group of fields"), ("layer_types", "full_attention", "must be a list"),
])
def test_wrong_types_are_named(tmp_path, family, field, value, rule):
    (line,) = complaint(tmp_path, BASE[family] | {field: value})
    assert line.startswith(f"field {field} is {value!r}: ") and rule in line


def test_every_problem_has_its_line(tmp_path):
    lines = complaint(tmp_path, BASE["llama"] | dict(hidden_size="64", rope_scaling=[], attn_logit_softcapping=30.0))
    assert [line.split()[1] for line in lines] == ["hidden_size", "rope_scaling", "attn_logit_softcapping"]


CHANGES = {
    "rope_scaling": {"rope_type": "longrope", "factor": 2.0}, "hidden_act": "gelu", "quantization_config": {"quant_method": "awq"},
    "attn_logit_softcapping": 30.0, "final_logit_softcapping": 30.0, "logit_scale": 0.5, "logits_scaling": 8.0,
    "attention_multiplier": 0.01, "residual_multiplier": 0.2, "embedding_multiplier": 12.0,
    "mlp_bias": True, "clip_qkv": 8.0, "query_pre_attn_scalar": 256,
    "layer_types": ["linear_attention"] * 4, "dual_chunk_attention_config": {"chunk_size": 4}, "no_rope_layers": [1, 0, 1, 1],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("field", CHANGES)
def test_fields_that_would_change_the_model_are_named(tmp_path, family, field):
    """Guards against a model that loads, has all its tensors, and computes something else than its authors trained."""
    (line,) = complaint(tmp_path, BASE[family] | {field: CHANGES[field]})
    assert {"rope_scaling": "rope type 'longrope'", "quantization_config": "quantiz"}.get(field, field) in line


WINDOWED = {family: {"use_sliding_window": True} for family in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")}


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt_oss"])
def test_windows_are_refused_where_the_family_has_none(tmp_path, family):
    (line,) = complaint(tmp_path, BASE[family] | {"sliding_window": 4} | WINDOWED.get(family, {}))
    assert "sliding_window" in line


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"glm4_moe", "gpt_oss", "qwen2", "qwen2_moe"}))
def test_attention_biases_are_refused_where_the_family_has_none(tmp_path, family):
    (line,) = complaint(tmp_path, BASE[family] | {"attention_bias": True})
    assert "attention_bias" in line


def test_linear_attention_layers_of_minimax(tmp_path):
    (line,) = complaint(tmp_path, BASE["minimax_m2"] | {"attn_type_list": [1, 0, 1, 1]})
    assert "attn_type_list" in line


def test_a_value_that_the_family_stumbles_over(tmp_path):
    (line,) = complaint(tmp_path, BASE["gpt_oss"] | {"rope_scaling": {"rope_type": "yarn"}})
    assert line == "field 'factor' is missing"
    (line,) = complaint(tmp_path, {k: v for k, v in BASE["llama"].items() if k != "head_dim"} | {"num_attention_heads": 0})
    assert "a field has a value that llama cannot use" in line


def test_the_types_of_all_fields_that_families_read_are_checked():
    """A family that reads a field which is in none of the tables would be the first to find a wrong type in it."""
    names = {*SIZES, *NUMBERS, *SWITCHES, *GROUPS, *LISTS, *NEUTRAL}
    # Compared with the values that are supported where they are read.
    names |= {"hidden_act", "model_type", "decoder_sparse_step", "topk_method", "scoring_func"}
    for file in (ROOT / "moerl" / "models").glob("*.py"):
        found = set(re.findall(r"""hf(?:\[|\.get\()["'](\w+)["']""", file.read_text()))
        assert found <= names, (file.name, found - names)
