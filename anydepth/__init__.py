"""anydepth: inference for language models that decide at every token how deep to think.

The public names are imported on first use, so that `import anydepth` needs no torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from anydepth.types import Chunk, Output, Request, Sampling, Score, Usage

if TYPE_CHECKING:
    from anydepth.engine.engine import Engine
    from anydepth.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Chunk", "Engine", "Output", "Request", "Sampling", "Score", "Usage"]

# Weights on huge pages, where Linux lends them on request: a CPU reads them a tenth faster. torch looks here once, when
# it makes its first tensor; 0 beforehand leaves it off.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

_LAZY = {"LLM": "anydepth.engine.llm", "Engine": "anydepth.engine.engine"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'anydepth' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
