"""What the engine says to full depth's answers under a profile, where no table can say it: each question's loss.

Under `project` that takes minutes a profile, so losses are kept in a file, a question a line, and a run that was
stopped goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from anydepth.calibrate.answers import Answer
from anydepth.calibrate.lines import whole_lines
from anydepth.dtypes import dtype_name
from anydepth.engine.engine import Engine
from anydepth.engine.llm import LLM
from anydepth.profile import Profile
from anydepth.progress import Countdown
from anydepth.types import Sampling, Score

LOSSES_FILE = "losses.jsonl"


def engine_scores(
    llm: LLM,
    answers: Sequence[Answer],
    profile: Profile,
    policy: str,
    *,
    fill: str,
    each: Callable[[int, Score], object] | None = None,
    report: Callable[[str], None] = print,
) -> list[Score | None]:
    """Each answer's decode tokens under a policy and fill, teacher-forced, by an engine on the loaded model; None for
    an answer without any. `each` hears of every score when it is there, with its place among the answers."""
    engine = Engine(
        llm.checkpoint.model, tokenizer=llm.tokenizer, eos_ids=llm.checkpoint.eos_ids, fill=fill, profiles=[profile]
    )
    sampling = Sampling(exit_policy=policy, profile=profile.name)
    places, requests = dict[str, int](), []
    for place, answer in enumerate(answers):
        if len(answer.answer_ids) > 1:  # the first token is the prefill's
            context = (*answer.prompt_ids, answer.answer_ids[0])
            requests.append(engine.prepare(context, sampling, forced=[answer.answer_ids[1:]], streaming=False))
            places[requests[-1].id] = place
    found: list[Score | None] = [None] * len(answers)
    countdown = Countdown(f"{profile.name}, fill {fill}: scored", len(requests), "answers", report)
    for chunk in engine.run(requests):
        if chunk.score is not None:
            place = places[chunk.request_id]
            found[place] = chunk.score
            if each is not None:
                each(place, chunk.score)
            countdown.advance()
    return found


def engine_losses(scores: Sequence[Score | None]) -> list[float]:
    """Each question's loss by what the engine said; 0 for an answer without decode tokens."""
    return [0.0 if score is None else _wrong(score) / len(score.argmax) for score in scores]


def kept_engine_losses(
    llm: LLM,
    answers: Sequence[Answer],
    profile: Profile,
    policy: str,
    *,
    fill: str,
    path: Path,
    report: Callable[[str], None] = print,
) -> list[float]:
    """`engine_losses` of `engine_scores`, of which only those are computed that `path` does not have: a JSONL, to which
    each is added when it is there. A line is for one model, heads, thresholds, policy, fill and answer. ValueError for
    a line that is broken."""
    checkpoint = llm.checkpoint
    dtype = dtype_name(checkpoint.model.dtype)
    same = [checkpoint.model_hash, profile.head_hash, profile.hash, policy, fill, dtype]
    keys = [hashlib.sha256(json.dumps([*same, *vars(answer).values()]).encode()).hexdigest() for answer in answers]
    known = _read(path)
    if before := sum(key in known for key in keys):
        report(f"{profile.name}, fill {fill}: {before} answers were scored before")
    known |= {key: 0.0 for key, answer in zip(keys, answers, strict=True) if len(answer.answer_ids) < 2}
    left = [place for place, key in enumerate(keys) if key not in known]
    with path.open("a", encoding="utf-8") as file:

        def keep(place: int, score: Score) -> None:
            row = {"key": keys[left[place]], "profile": profile.name, "wrong": _wrong(score), "of": len(score.argmax)}
            file.write(json.dumps(row) + "\n")
            file.flush()

        scores = engine_scores(llm, [answers[n] for n in left], profile, policy, fill=fill, each=keep, report=report)
    known |= zip((keys[place] for place in left), engine_losses(scores), strict=True)
    return [known[key] for key in keys]


def _wrong(score: Score) -> int:
    return score.argmax.count(False)


def _read(path: Path) -> dict[str, float]:
    """Losses by key."""
    found = {}
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            row = json.loads(line)
            found[str(row["key"])] = int(row["wrong"]) / int(row["of"])
        except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
            raise ValueError(f"{path}, line {number} is no loss ({error!r}); remove the line") from error
    return found
