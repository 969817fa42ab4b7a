"""Waiting on Ray actors so that a failure is named at once, whoever fails first and whoever hangs because of it."""

from __future__ import annotations

import time
from collections.abc import Mapping

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

SETTLE_S = 3.0  # after a first failure: time for the cause to show beside its consequences
# What a rank says when another one has gone: a consequence, never the cause.
CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out", "NCCL communicator was aborted")


class RemoteError(RuntimeError):
    """A worker failed or died; the message names it and carries its traceback."""


def collect(refs: Mapping[str, ray.ObjectRef], timeout_s: float | None = None) -> dict[str, object]:
    """The results of `refs` by the worker's name, in that order.

    Raises `RemoteError` for the worker that failed as soon as one does: a dead process before a Python error, an error of its own
    before one about a lost connection. The others are not waited for. `timeout_s` bounds the whole wait.
    """
    names = {ref: name for name, ref in refs.items()}
    pending, results, failures = list(names), {}, {}
    deadline = time.monotonic() + timeout_s if timeout_s else None
    while pending:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not ready:
            late = ", ".join(names[ref] for ref in pending)
            raise RemoteError(_cause(failures) if failures else f"no answer within {timeout_s:.0f} s from {late}")
        try:
            results[names[ready[0]]] = ray.get(ready[0])
        except RayError as error:
            if not failures:
                deadline = time.monotonic() + SETTLE_S
            failures[names[ready[0]]] = error
    if failures:
        raise RemoteError(_cause(failures))
    return {name: results[name] for name in refs}


def _cause(failures: Mapping[str, RayError]) -> str:
    name = min(failures, key=lambda n: _rank(failures[n]))
    error = failures[name]
    if isinstance(error, RayTaskError):
        return f"{name} failed:\n{str(error).strip()}"
    return f"{name} died: {str(error).strip()}"


def _rank(error: RayError) -> int:
    if isinstance(error, RayActorError):
        return 0
    return 2 if any(words in str(error) for words in CONSEQUENCES) else 1
