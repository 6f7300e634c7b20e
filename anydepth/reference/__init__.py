"""Slow, dense models written from the definitions alone: what the engine is tested against.

Nothing here imports another room of the package. Three calls: `Model(config, weights, segments=...)`, then
`generate(model, prompt_ids, fill=..., **settings)` or `score(model, context_ids, continuation_ids, ...)`; `tiny_config`
and `random_weights` make a small random model of either kind.
"""

from anydepth.reference.fills import FILLS, deferred_depths
from anydepth.reference.generate import Result, Usage, generate, score
from anydepth.reference.model import Model
from anydepth.reference.policies import Row, make_policy
from anydepth.reference.sampling import Draw, philox, process, sample, uniform
from anydepth.reference.weights import random_weights, tiny_config

__all__ = [
    "FILLS",
    "Draw",
    "Model",
    "Result",
    "Row",
    "Usage",
    "deferred_depths",
    "generate",
    "make_policy",
    "philox",
    "process",
    "random_weights",
    "sample",
    "score",
    "tiny_config",
    "uniform",
]
