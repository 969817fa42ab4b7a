"""Verifier for reasoning_gym's tasks: the text between answer tags, scored by the task's own scorer."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from moerl.rewards.answer_guard import is_safe

ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


def reward(prompt: str, response: str, record: dict) -> dict[str, float]:
    """Score in [0, 1] of the last <answer>...</answer> of the response, 0 without one.

    `record` holds "task", a reasoning_gym dataset name, and "entry", that dataset's item (question, answer, metadata).
    Many scorers give partial credit. Also returned: "format", 1 if there was an answer, and "correct", 1 for full
    marks. An answer that the scorer cannot read, or must not be given (see answer_guard), scores 0.
    Raises ValueError for a record without task or entry, or an unknown task.
    """
    for key in ("task", "entry"):
        if key not in record:
            raise ValueError(f"a reasoning_gym record needs 'task' and 'entry': this one has no {key!r}")
    scorer = _scorer(record["task"])
    answer = extract_answer(response)
    if answer is None:
        return {"score": 0.0, "format": 0.0, "correct": 0.0}
    value = 0.0
    if answer == record["entry"]["answer"] or is_safe(record["task"], answer):
        value = _score(scorer, answer, record["entry"])
    return {"score": value, "format": 1.0, "correct": float(value >= 1.0)}


def extract_answer(response: str) -> str | None:
    """The stripped text in the last pair of answer tags with no such tag between them, or None."""
    answers = ANSWER.findall(response)
    return answers[-1].strip() if answers else None


def _score(scorer: Callable, answer: str, entry: dict) -> float:
    try:
        return float(scorer(answer, entry))
    except Exception:
        # some scorers raise on text they cannot parse: wrong, unless the entry's own answer makes them raise as well
        scorer(entry["answer"], entry)
        return 0.0


@cache
def _scorer(task: str) -> Callable[[str, dict], float]:
    import reasoning_gym  # about a second: only for runs that use it

    try:
        return reasoning_gym.get_score_answer_fn(task)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"reasoning_gym task {task!r}: {error}") from error
