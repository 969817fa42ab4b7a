"""Read a run's configuration: OmegaConf YAML, dotted overrides, then the typed groups of schema.py."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError

Config = TypeVar("Config", bound=BaseModel)


class ConfigError(ValueError):
    """What is wrong with a configuration, one line a problem."""


def load(path: str | Path, cls: type[Config], overrides: Sequence[str] = ()) -> Config:
    """Reads the YAML file `path` as a `cls` (SFTConfig or TrainConfig).

    `overrides` are `a.b=c`; each one sets that key to the value c, parsed as YAML. Interpolations (`${a.b}`,
    `${oc.env:HOME}`) are resolved after the overrides. Raises ConfigError.
    """
    tree = _read(Path(path))
    for override in overrides:
        _override(tree, override)
    try:
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"missing required key {error.full_key}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {_first_line(error)}") from None
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        lines = [line for problem in error.errors() for line in _lines(problem, cls)]
        raise ConfigError("\n".join(lines)) from None


def dump(config: BaseModel) -> str:
    """The resolved configuration as YAML; `load` reads the same configuration back."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape(config.model_dump())))


def _read(path: Path) -> DictConfig:
    try:
        tree = OmegaConf.create(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} cannot be read: {_first_line(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_yaml_problem(error)}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from None
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path}: the file must hold keys and values, not a list")
    return tree


def _override(tree: DictConfig, text: str) -> None:
    key, equals, raw = text.partition("=")
    if not equals or not all(key.split(".")) or key != key.strip():
        raise ConfigError(f"override {text!r} must read key=value, for example trainer.steps=10")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={raw}"]), resolve=False)["value"]
        # merge=False: an override sets the key, so `data.options={}` empties the options.
        OmegaConf.update(tree, key, value, merge=False)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {text!r}: the value is not valid YAML{_yaml_problem(error)}") from None
    except (OmegaConfBaseException, AttributeError, IndexError, TypeError) as error:
        raise ConfigError(f"override {text!r}: {_first_line(error)}") from None


def _lines(problem: dict[str, Any], cls: type[BaseModel]) -> list[str]:
    """One pydantic problem as lines for a reader who knows the YAML and not pydantic."""
    path = [str(part) for part in problem["loc"]]
    key, kind, given = ".".join(path), problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return [_unknown(cls, path)]
    if kind == "missing":
        field = _dotted_fields(cls)[key]
        leaves = [k for k, f in _dotted_fields(_group(field.annotation), f"{key}.").items() if f.is_required()]
        return [f"missing required key {leaf}" for leaf in leaves or [key]]
    rule = str(problem["ctx"]["error"]) if kind == "value_error" else problem["msg"]
    if kind.startswith("model_"):
        rule = "must be a group of keys"
    if isinstance(given, dict) and kind == "value_error":  # a rule between keys of a group
        return [rule if not key or rule.startswith(f"{key}.") else f"{key}: {rule}"]
    return [f"{key} is {_shown(given)}: {rule.replace('Input should', 'must')}"]


def _unknown(cls: type[BaseModel], path: list[str]) -> str:
    *place, leaf = path
    prefix = "".join(f"{part}." for part in place)
    if "." in leaf:
        return f"unknown key {prefix}{leaf!r}: in a file, keys are nested; dots are for overrides"
    fields = _dotted_fields(cls)
    here = [k.removeprefix(prefix) for k in fields if k.startswith(prefix) and "." not in k.removeprefix(prefix)]
    near = [prefix + k for k in difflib.get_close_matches(leaf, here, n=1)]
    if not near:  # the right name in the wrong place
        names = difflib.get_close_matches(leaf, {k.split(".")[-1] for k in fields}, n=1, cutoff=0.75)
        elsewhere = [k for k in fields if k.split(".")[-1] in names]
        near = difflib.get_close_matches(prefix + leaf, elsewhere, n=1, cutoff=0.0)
    if near:
        return f"unknown key {prefix}{leaf}; nearest valid key: {near[0]}"
    return f"unknown key {prefix}{leaf}; valid keys there: {', '.join(here)}"


def _dotted_fields(cls: type[BaseModel] | None, prefix: str = "") -> dict[str, Any]:
    """Every dotted key under `cls`, groups included, with its pydantic field."""
    fields = {}
    for name, field in cls.model_fields.items() if cls else ():
        fields[prefix + name] = field
        fields |= _dotted_fields(_group(field.annotation), f"{prefix}{name}.")
    return fields


def _group(annotation: Any) -> type[BaseModel] | None:
    """The group class of `Group` or `Group | None`, else None."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _escape(value: Any) -> Any:
    """A text that holds `${` must not become an interpolation when it is read again."""
    if isinstance(value, dict):
        return {k: _escape(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escape(v) for v in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{where}: {getattr(error, 'problem', None) or _first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]
