"""Run a reward function over a batch of samples, and say exactly which sample broke it."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SHOWN_CHARACTERS = 120


class RewardError(ValueError):
    """A reward function was not found, raised, or returned something that is not a finite score."""


@dataclass
class Scores:
    """scores: one a sample, None where the reward failed. metrics: for each name, in order, the values of the samples
    that gave one. errors: the text of each failure."""

    scores: list[float | None] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def score(
    fn: Callable,
    prompts: Sequence,
    responses: Sequence[str],
    records: Sequence[dict],
    *,
    on_error: Literal["stop", "skip"],
) -> Scores:
    """Score N samples with a reward function (see `load_reward` for its two forms).

    A reward that raises, or returns anything but a finite number, raises RewardError with the sample's index, prompt
    and response, the original text and the line it came from ("stop"), or leaves None and that text ("skip"). A batch
    function that raises fails all N samples. Metrics that are not finite numbers are left out.
    Raises ValueError when the three lists differ in length, RewardError when a batch function returns another length.
    """
    if not len(prompts) == len(responses) == len(records):
        raise ValueError(
            f"{len(prompts)} prompts, {len(responses)} responses and {len(records)} records: they must be equally many"
        )
    if on_error not in ("stop", "skip"):
        raise ValueError(f"on_error {on_error!r} is unknown: choose stop or skip")
    result = Scores()
    for index, outcome in enumerate(_outcomes(fn, prompts, responses, records)):
        try:
            if isinstance(outcome, Exception):
                raise outcome
            value, metrics = _parse(outcome)
        except Exception as error:
            text = _describe(error, index, prompts[index], responses[index])
            if on_error == "stop":
                raise RewardError(text) from error
            result.scores.append(None)
            result.errors.append(text)
            continue
        result.scores.append(value)
        for name, number in metrics.items():
            result.metrics.setdefault(name, []).append(number)
    return result


def _outcomes(fn: Callable, prompts: Sequence, responses: Sequence[str], records: Sequence[dict]) -> Iterator:
    """What the reward returned for each sample, or the exception it raised; lazily, so that "stop" stops."""
    if not getattr(fn, "__name__", "").endswith("_batch"):
        for sample in zip(prompts, responses, records):
            try:
                yield fn(*sample)
            except Exception as error:
                yield error
        return
    if not prompts:
        return
    try:
        outcomes = list(fn(list(prompts), list(responses), list(records)))
    except Exception as error:
        outcomes = [error] * len(prompts)
    if len(outcomes) != len(prompts):
        raise RewardError(f"{fn.__name__} returned {len(outcomes)} rewards for {len(prompts)} samples")
    yield from outcomes


def _parse(outcome: Any) -> tuple[float, dict[str, float]]:
    if not isinstance(outcome, dict):
        outcome = {"score": outcome}
    if "score" not in outcome:
        raise TypeError(f"the reward returned a dict without 'score': {_shorten(outcome)}")
    value = _number(outcome["score"])
    if value is None or not math.isfinite(value):
        raise TypeError(f"the reward returned {_shorten(outcome['score'])}, which is not a finite number")
    numbers = {name: _number(metric) for name, metric in outcome.items() if name != "score"}
    return value, {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}


def _number(value: Any) -> float | None:
    """Python, NumPy and one-element tensor numbers and booleans; text is no number, even if it spells one."""
    try:
        return float(value) if hasattr(value, "__float__") else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _describe(error: Exception, index: int, prompt: Any, response: Any) -> str:
    place = ""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    if own:
        # the user's own line, and where it ended if that is deeper
        frames = own[:1] if len(own) == 1 else [own[0], own[-1]]
        place = " (" + " -> ".join(f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames) + ")"
    return (
        f"reward failed on sample {index}: {type(error).__name__}: {error}{place}; "
        f"prompt {_shorten(prompt)}; response {_shorten(response)}"
    )


def _shorten(value: Any) -> str:
    text = repr(value)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} ... {text[-half:]}"
