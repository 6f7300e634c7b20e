"""Groups of answers at intervals 1, 2, 4 and 8, beside the eager reference that reads every token at the same depth.

Run it: python examples/rollout.py [--threads 1]

An interval of n thinks through all four loops of nano at every n-th token and reads those between after two. The
reference (`anydepth.reference`) answers one request at a time, keeps all K/V and shares no code with the engine; from
the same Sampling it must draw the same tokens at the same depths.
"""

from __future__ import annotations

import argparse
import time

import torch

from anydepth import LLM, Sampling
from anydepth.models.nano.questions import questions
from anydepth.reference import Model, generate
from anydepth.rollout import Answer, Rollout

FILL = "deferred"
INTERVALS, SHALLOW_DEPTH = (1, 2, 4, 8), 2
PROMPTS, N = 6, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 is best on a busy machine")
    torch.set_num_threads(parser.parse_args().threads)
    # In float64 rounding decides no token, so that "equal" is meant to the last one.
    llm = LLM("nano", fill=FILL, dtype="float64")
    reference = Model(
        llm.checkpoint.config, {name: slot.clone() for name, slot in llm.checkpoint.model.slots().items()}
    )
    prompts = [question.prompt for question in questions("validation", n=PROMPTS)]
    Rollout(llm).generate(prompts, Sampling(max_tokens=2))  # afterwards the prompts are known, for every row alike
    print(f"{PROMPTS} prompts x {N} answers, fill {FILL}, shallow depth {SHALLOW_DEPTH}")
    print("interval  mean depth  executed  tokens/s  eager tokens/s  same tokens and depths")
    for interval in INTERVALS:
        sampling = Sampling(temperature=1.0, seed=0, interval=interval, shallow_depth=SHALLOW_DEPTH)
        start = time.perf_counter()
        answers = [answer for group in Rollout(llm).groups(prompts, sampling, n=N) for answer in group.answers]
        middle = time.perf_counter()
        same = [eager(reference, llm, answer) == (answer.token_ids, answer.depths) for answer in answers]
        end = time.perf_counter()
        usage = [answer.usage for answer in answers]
        tokens = sum(one.output_tokens for one in usage)
        print(
            f"{interval:8}  {sum(one.segments_read for one in usage) / sum(one.decode_tokens for one in usage):10.2f}"
            f"  {sum(one.segments_executed for one in usage):8}  {tokens / (middle - start):8.0f}"
            f"  {tokens / (end - middle):14.0f}  {'equal' if all(same) else f'{same.count(False)} answers differ'}"
        )


def eager(reference: Model, llm: LLM, answer: Answer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and depths of the answer's request, one token after the other."""
    asked = answer.sampling
    assert asked.seed is not None
    found = generate(
        reference,
        answer.prompt_ids,
        fill="full",
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        seed=asked.seed,
        eos_ids=llm.checkpoint.eos_ids,
        interval=asked.interval,
        shallow_depth=asked.shallow_depth,
    )
    return tuple(found.token_ids), tuple(found.depths)


if __name__ == "__main__":
    main()
