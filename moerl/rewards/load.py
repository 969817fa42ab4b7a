"""Find a reward function by name, dotted path or file."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from moerl.rewards.score import RewardError

BUILT_IN = {"reasoning_gym": "moerl.rewards.reasoning_gym:reward"}
DEFAULT_FUNCTION = "reward"


def load_reward(spec: str) -> Callable:
    """The reward function that `spec` names.

    A built-in name ("reasoning_gym"), a dotted path ("package.module:function" or "package.module.function"), or a file
    ("path/to/file.py:function"; without a function, `reward`).

    The function is called as reward(prompt, response, record) and returns a number, or a dict with "score" whose other
    numeric entries become metrics. A function whose name ends in `_batch` is called once with three lists,
    reward_batch(prompts, responses, records), and returns a list.

    Raises RewardError, in one line, when the module, file or function is missing or fails to import.
    """
    spec = BUILT_IN.get(spec, spec)
    in_file = re.fullmatch(r"(?P<path>.+\.py)(:(?P<name>\w+))?", spec)
    if in_file:
        where, name = in_file["path"], in_file["name"] or DEFAULT_FUNCTION
        module = _from_file(Path(where), spec)
    else:
        where, _, name = spec.rpartition(":" if ":" in spec else ".")
        if not where or not name:
            raise RewardError(
                f"reward {spec!r} is neither a built-in ({', '.join(BUILT_IN)}) nor package.module:function "
                "nor path/to/file.py:function"
            )
        module = _from_package(where, spec)
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"reward {spec!r}: no function {name!r} in {where}")
    return function


def _from_package(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise RewardError(f"reward {spec!r}: no module {name!r}") from error
        raise RewardError(f"reward {spec!r}: importing {name} failed: {_one_line(error)}") from error


def _from_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"reward {spec!r}: no file {path}")
    module_spec = importlib.util.spec_from_file_location(f"moerl_reward_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"reward {spec!r}: importing {path} failed: {_one_line(error)}") from error
    return module


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
