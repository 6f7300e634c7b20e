"""Rollouts for reinforcement learning: groups of answers, replay of their probabilities, adapters for trainers.

The public names are imported on first use; those of the adapters, which need more packages, from their modules.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anydepth.rollout.answers import Answer, answer_of
    from anydepth.rollout.logprobs import Replay, replay
    from anydepth.rollout.record import read_answers
    from anydepth.rollout.rollout import Group, Groups, Rollout

__all__ = ["Answer", "Group", "Groups", "Replay", "Rollout", "answer_of", "read_answers", "replay"]

# No module is named as what is in it: importing it would put it in the place of the name.
_LAZY = {
    "Answer": "anydepth.rollout.answers",
    "Group": "anydepth.rollout.rollout",
    "Groups": "anydepth.rollout.rollout",
    "Replay": "anydepth.rollout.logprobs",
    "Rollout": "anydepth.rollout.rollout",
    "answer_of": "anydepth.rollout.answers",
    "read_answers": "anydepth.rollout.record",
    "replay": "anydepth.rollout.logprobs",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'anydepth.rollout' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
