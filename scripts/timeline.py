"""The picture of docs/late-signals.md, from runs of nano: python scripts/timeline.py --out docs/late-signals.png"""

from __future__ import annotations

import argparse

import torch

from anydepth import LLM, Sampling
from anydepth.bench.timeline import Timeline, record
from anydepth.bench.timeline_picture import draw

MODES = ("sync", "delayed", "exact", "resident")
QUESTIONS = (  # what is asked, and how many tokens the answer may have
    ("Ann has 5 . Bob has 3 more than Ann . How many has Bob ?", 16),  # ends with a stop id
    ("Ann has 5 . Bob has 3 more than Ann . How many has Bob and why ?", 6),  # ends with its length
)


def run(signals: str) -> Timeline:
    """Both questions at once, in an engine whose host hears of a turn one turn later."""
    llm = LLM("nano", signals=signals)
    ask = [(text, Sampling(max_tokens=most, exit_threshold=0.99)) for text, most in QUESTIONS]
    return record(llm.engine, [llm.engine.prepare(text, sampling) for text, sampling in ask])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="docs/late-signals.png", help="the PNG to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draw([run(signals) for signals in MODES], arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
