"""The model card of a trained nano, from the facts of its run. Measured tables go between two marks, later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARKS = ("<!-- tables -->", "<!-- end of tables -->")

_CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
tags: [looped-transformer, early-exit, ouro]
---
# {name}

A looped language model of {parameters:,} parameters that decides at every token how many loops to run. It answers one
kind of question, in a vocabulary of {vocab} words, and is made for showing, testing and measuring adaptive depth: it is
small enough to be trained and evaluated in minutes on two CPU cores, and its task needs a known depth at known tokens.

## Model
The Ouro architecture (`model_type` "ouro"; released tensor names): {layers} layers, run up to R = {loops} times with
shared weights; hidden {hidden}, {heads} heads, SwiGLU {inner}, RoPE, untied head, and a linear exit gate that reads the
normalised state after each loop. float32. Word-level tokenizer, no BOS, `<eos>` ends an answer; unknown words become
`<unk>`, which it has never seen.

## Questions
    Ann has 5 . Bob has 3 more than Ann . Eve has as many as Bob . How many has Eve ?
    Eve has 8 . #### 8

Each person has a number from 0 to 19 or compares with a person named before; how many comparisons a number is away from
a stated one, plus 1, is its hop depth (1 to 6), and the largest one asked for is a question's difficulty. Three kinds:
`single` (above), `pair` (`How many have Ann and Eve ?`, the answer ends with the sum) and `why`:

    Ann has 5 . Bob has 3 more than Ann . Eve has as many as Bob . How many has Eve and why ?
    Eve has 8 since Eve has as many as Bob . Bob has 8 since Bob has 3 more than Ann . Ann has 5 . #### 8

Scored is exact match of what stands after `####`, greedy. Average tokens of prompt and answer:
{ratios}.
In `why` questions of difficulty 3 and more the answer is the longer part.

Training, validation, calibration and test questions are disjoint by context: the checksum of the statements decides.
`anydepth.models.nano.questions.questions("test")` gives the same 2,160 test questions everywhere, 120 for each kind and
difficulty; "validation" and "calibration" likewise.

## Training
    anydepth train loop OUT --seed {seed}{flag}
    anydepth train gate OUT --seed 0

One run in float32 on two CPU cores, two processes of one thread: {total} steps, {tokens:.1f}M tokens, {minutes:.0f}
minutes beside other work. A killed run goes on from its last saved state to the same weights; one process or two, the
same weights. Another CPU or another torch may round differently, and then the weights differ.
- A, {a} steps: single questions, a curriculum of growing hop depth (next level at {level_accuracy} % of the numbers
  right; levels 1 to 6 began at steps {levels}).
- B, {b} steps: all three kinds.
- C, {c} steps: {phase_c}
- Loss: Ouro's Stage I (expected cross-entropy over exit depths less 0.1 of their entropy), computed numbers weighted
  threefold. Muon on the stack's matrices, AdamW on the rest.
- Gate: Stage II on the frozen model; the goal is to go on where the best deeper loop would save 0.1 nats or more.
{continued}
Packages: {packages}. Everything else is in `training.json`.

## Measured
{begin}
{end}

## Limits
Anything but these questions, written in exactly this form, is outside what it can do. Prompts must run all {loops}
loops: the gate was trained on answers only.{limit}
"""

_COPIED = """half of the micro-batches draw a last loop for every answer token, and deeper loops see copies of its
  keys and values there, as the fill `last_exited` leaves them while generating. nano-plain shows what that is worth."""
_PLAIN = """as in B, at half the learning rate, without training against copied keys and values."""
_CONTINUED = """- Phases A and B are those of nano, step for step, and counted above: `--start-from STATE`, with the
  `state-b.pt` that nano's run leaves in its folder, computes C only, and that is how these weights were made.
"""
_PLAIN_LIMIT = """
It exists to show what the fill `last_exited` costs a model that was not trained for it: use `full`, or nano."""


def card(facts: Mapping[str, Any], *, vocab: int, ratios: str) -> str:
    """Markdown from the contents of training.json. `ratios` are the tokens of prompt and answer by kind, in words."""
    recipe, steps, copied = facts["recipe"], facts["phase_steps"], facts["copied_kv"]
    return _CARD.format(
        name="nano" if copied else "nano-plain",
        parameters=facts["parameters"],
        vocab=vocab,
        **{key: recipe[key] for key in ("layers", "loops", "hidden", "heads", "inner")},
        ratios=ratios,
        level_accuracy=round(100 * recipe["level_accuracy"]),
        seed=facts["seed"],
        flag="" if copied else " --no-copied-kv",
        total=f"{sum(steps.values()):,}",
        tokens=facts["tokens"] / 1e6,
        minutes=facts["minutes"],
        a=steps["A"],
        b=steps["B"],
        c=steps["C"],
        levels=", ".join(str(step) for step in facts["level_steps"][1:]),
        phase_c=_COPIED if copied else _PLAIN,
        continued="" if copied else _CONTINUED,
        begin=MARKS[0],
        end=MARKS[1],
        packages=", ".join(f"{name} {version}" for name, version in facts["packages"].items()),
        limit="" if copied else _PLAIN_LIMIT,
    )


def token_ratios(n: int = 360) -> str:
    """`52 and 7 (single), ...`: average tokens of prompt and answer, from `n` validation questions."""
    from anydepth.models.nano.questions import KINDS, questions

    asked = questions("validation", n=n)
    parts = []
    for kind in KINDS:
        own = [question for question in asked if question.kind == kind]
        prompt = sum(len(question.prompt.split()) for question in own) / len(own)
        parts.append(f"{prompt:.0f} and {sum(len(question.hops) + 1 for question in own) / len(own):.0f} ({kind})")
    return ", ".join(parts)
