"""Prompts of a run: read, rendered with the chat template, tokenized, and handed out epoch after epoch."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from moerl.config.schema import DataConfig

REASONING_GYM = "reasoning_gym:"

log = logging.getLogger(__name__)


class DataError(ValueError):
    """What is wrong with the prompts, in one line."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. `index` is its row in the source; `record` that row, or {"task", "entry", "answer"} of a task."""

    index: int
    text: str
    token_ids: list[int]
    record: dict[str, Any]


def load_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Prompt]:
    """Reads `config.prompts` and renders every prompt with the chat template, ready for the assistant's turn.

    A prompt is a text (one user message, after `config.system` if set) or a list of messages. Prompts longer than
    `config.max_prompt_tokens` are dropped and counted in the log. Raises DataError.
    """
    if not tokenizer.chat_template:
        raise DataError(f"the tokenizer {tokenizer.name_or_path} has no chat template")
    if config.prompts.startswith(REASONING_GYM):
        records, prompts = _task_records(config, seed)
    else:
        records = _file_records(Path(config.prompts).expanduser(), config.prompt_column)
        prompts = [record[config.prompt_column] for record in records]
    texts = [_render(prompt, config, tokenizer, row) for row, prompt in enumerate(prompts)]
    token_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    rows = [Prompt(*row) for row in zip(range(len(texts)), texts, token_ids, records)]
    fitting = [row for row in rows if len(row.token_ids) <= config.max_prompt_tokens]
    if not fitting:
        shortest = min(len(row.token_ids) for row in rows)
        raise DataError(
            f"all {len(rows)} prompts of {config.prompts} are longer than data.max_prompt_tokens "
            f"{config.max_prompt_tokens}; the shortest has {shortest}"
        )
    if len(fitting) < len(rows):
        dropped = len(rows) - len(fitting)
        log.warning("dropped %d of %d prompts longer than %d tokens", dropped, len(rows), config.max_prompt_tokens)
    return fitting


def answers(prompts: Sequence[Prompt], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Target token ids of supervised training, each ending in the tokenizer's end token.

    `<answer>...</answer>` for a reasoning_gym task; the answer column for a file. Raises DataError.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer {tokenizer.name_or_path} has no end token (eos)")
    task = config.prompts.startswith(REASONING_GYM)
    column = "answer" if task else config.answer_column
    texts = []
    for prompt in prompts:
        if prompt.record.get(column) is None:
            present = ", ".join(prompt.record)
            where = f"row {prompt.index} of {config.prompts}"
            raise DataError(f"{where} has no answer: column {column} (present: {present})")
        text = str(prompt.record[column])
        texts.append(f"<answer>{text}</answer>" if task else text)
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


class PromptStream:
    """Endless prompts: every epoch uses each prompt once, in an order that depends on `seed` and the epoch alone.

    A batch that spans two epochs can hold a prompt twice, so a group of samples is known by its place in the batch and
    not by `Prompt.index`.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        if not prompts:
            raise DataError("there are no prompts")
        self._prompts, self._seed, self._shuffle = prompts, seed, shuffle
        self._digest = hashlib.sha256(repr([p.token_ids for p in prompts]).encode()).hexdigest()[:16]
        self._begin(epoch=0, position=0)

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts."""
        batch = []
        while len(batch) < n:
            if self._position == len(self._order):
                self._begin(self._epoch + 1, position=0)
            taken = self._order[self._position : self._position + n - len(batch)]
            self._position += len(taken)
            batch += [self._prompts[i] for i in taken]
        return batch

    def state(self) -> dict[str, Any]:
        """The exact position, as JSON holds it."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from `state`. Raises DataError when it belongs to another order of prompts."""
        for key, value in self._identity().items():
            if state[key] != value:
                raise DataError(f"the saved position belongs to prompts with {key} {state[key]}, this run has {value}")
        self._begin(state["epoch"], state["position"])

    def _identity(self) -> dict[str, Any]:
        return {"prompts": len(self._prompts), "seed": self._seed, "shuffle": self._shuffle, "digest": self._digest}

    def _begin(self, epoch: int, position: int) -> None:
        self._epoch, self._position, self._order = epoch, position, list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)


def reasoning_gym_dataset(task: str, options: dict[str, Any], size: int, seed: int) -> Any:
    """A reasoning_gym data set of `size` entries. Raises DataError for an unknown task or a wrong option."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise DataError(f"unknown reasoning_gym task {task!r}{_nearest(task, DATASETS)}")
    if taken := {"size", "seed"} & set(options):
        raise DataError(f"data.options may not set {', '.join(sorted(taken))}: data.size and trainer.seed do")
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    for option in options:
        if option not in known:
            raise DataError(f"reasoning_gym task {task} has no option {option!r}{_nearest(option, known)}")
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **options)
    except Exception as error:  # its checks are asserts, and type errors come from anywhere
        raise DataError(f"reasoning_gym task {task} with options {options}: {error}") from error


def _task_records(config: DataConfig, seed: int) -> tuple[list[dict[str, Any]], list[str]]:
    task = config.prompts.removeprefix(REASONING_GYM)
    entries = reasoning_gym_dataset(task, config.options, config.size, seed)
    try:
        entries = [entries[i] for i in range(len(entries))]
    except Exception as error:
        raise DataError(f"reasoning_gym task {task} with options {config.options}: {error}") from error
    records = [{"task": task, "entry": entry, "answer": entry["answer"]} for entry in entries]
    return records, [entry["question"] for entry in entries]


def _file_records(path: Path, column: str) -> list[dict[str, Any]]:
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise DataError(f"data.prompts {path}: must end in .jsonl or .parquet, or be {REASONING_GYM}<task>")
    if not path.is_file():
        raise DataError(f"data.prompts {path}: there is no such file")
    records = readers[path.suffix](path)
    if not records:
        raise DataError(f"data.prompts {path}: the file holds no rows")
    for row, record in enumerate(records):
        if column not in record:
            raise DataError(f"{path}, row {row}: no column {column!r} (present: {', '.join(record)})")
    return records


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    records = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}: {error.msg} (column {error.colno})") from None
            except UnicodeDecodeError:
                raise DataError(f"{path}, line {number}: not UTF-8") from None
            if not isinstance(record, dict):
                raise DataError(f"{path}, line {number}: must be a JSON object")
            records.append(record)
    return records


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from None


def _render(prompt: Any, config: DataConfig, tokenizer: PreTrainedTokenizerBase, row: int) -> str:
    where = f"row {row} of {config.prompts}"
    if isinstance(prompt, str):
        system = [{"role": "system", "content": config.system}] if config.system else []
        messages = [*system, {"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and prompt and all(_is_message(part) for part in prompt):
        messages = prompt
    else:
        raise DataError(f"{where}: a prompt must be a text or a list of messages with role and content")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template raises what it likes, e.g. for a role it does not know
        raise DataError(f"{where}: the chat template refuses it: {error}") from error


def _is_message(part: Any) -> bool:
    return isinstance(part, dict) and {"role", "content"} <= part.keys()


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; nearest: {', '.join(near)}" if near else ""
