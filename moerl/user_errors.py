"""Errors that a user can mend: printed as lines, without a traceback, and exit code 1."""

from __future__ import annotations

import sys


class user_errors:
    """Within it, an error whose message says all, or is of the kinds `more`, ends the command with that message."""

    def __init__(self, *more: type[BaseException]):
        self.more = more

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None or not issubclass(kind, (*_mendable(), *self.more)):
            return False
        print("error: " + str(error).replace("\n", "\n       "), file=sys.stderr)
        raise SystemExit(1)


def _mendable() -> tuple[type[BaseException], ...]:
    """The errors whose message says all. Only classes of loaded modules: an error of any other cannot have been raised."""
    names = {
        "moerl.config.load": "ConfigError",
        "moerl.layout": "LayoutError",
        "moerl.models.arch": "ModelError",
        "moerl.controller.data": "DataError",
        "moerl.controller.checkpoints": "CheckpointError",
        "moerl.controller.placement": "ClusterError",
        "moerl.controller.schedule": "ScheduleError",
        "moerl.rewards.score": "RewardError",
        "moerl.rollout.remote": "RemoteError",
        "checkpoint_tools.stream": "StreamError",
    }
    return tuple(getattr(sys.modules[m], name) for m, name in names.items() if m in sys.modules)
