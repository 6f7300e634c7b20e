"""Random schedules: a model, an engine, and requests that arrive, end and are aborted over time.

`play(draw(rng))` runs one and checks everything a schedule must leave true. A failure shows the schedule as an
expression that can be pasted into a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from anydepth.engine.completions import AdversarialCompletions
from anydepth.engine.engine import Engine
from anydepth.engine.submission import Submission
from anydepth.reference.fills import deferred_depths
from anydepth.reference.generate import Result, score
from anydepth.reference.model import Model as Reference
from anydepth.types import Output, Request, Sampling, Score, Usage
from tests.equality import Verdict, compare
from tests.helpers import Watch, assert_empty, expected, poison, shortened, twins

VOCABULARY = 19  # small, so that stop ids do come up
PATIENCE = 5000  # turns after which a schedule is taken to hang


@dataclass(frozen=True)
class Asked:
    """A request: when it is submitted and, if at all, aborted (in steps of the engine). With `forced`, continuations
    to score. With `takes_over` it comes, under the same id, as soon as the request before it was aborted."""

    arrival: int
    prompt: tuple[int, ...]
    settings: dict[str, Any]
    abort: int | None = None
    forced: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    takes_over: bool = False


@dataclass(frozen=True)
class Schedule:
    """`changes` are those of `tiny_config`, `engine` the engine's own options. `late` is the seed by which outcomes
    come late, and `squeezes` are turns before which a running request, the n-th, has to give up its place."""

    kind: str
    seed: int
    changes: dict[str, Any]
    segments: tuple[int, ...] | None
    dtype: str
    fill: str
    eos_ids: tuple[int, ...]
    engine: dict[str, Any]
    asked: tuple[Asked, ...]
    late: int | None = None
    squeezes: tuple[tuple[int, int], ...] = ()


class Letters:
    """A tokenizer for models of VOCABULARY tokens: each is a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in ids)


@dataclass
class Ran:
    """What one request gave: its chunks' tokens and depths, the scores of its continuations, its last word."""

    request: Request | None = None
    streamed: list[tuple[int | None, int | None]] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    output: Output | None = None
    shared: int = 0  # prompt positions that another had prefilled

    @property
    def aborted(self) -> bool:
        return self.output is not None and self.output.finish_reason == "abort"

    @property
    def usages(self) -> list[Usage]:
        """One a continuation that was scored, or the answer's; what an abort cut short counts too."""
        scored = [one.usage for one in self.scores]
        return scored + [self.output.usage] * (not scored or self.aborted) if self.output else scored

    @property
    def decoded(self) -> list[tuple[int, ...]]:
        """Depths of what was read, a tuple a continuation or answer."""
        return [one.depths for one in self.scores] or [self.output.depths if self.output else ()]


@dataclass
class Played:
    """What a schedule gave, request by request; how often requests gave way, and prompt tokens that were shared; with a
    reference, its verdicts."""

    ran: list[Ran]
    preempted: int = 0
    shared_tokens: int = 0
    verdicts: list[Verdict] = field(default_factory=list)


FILLS = {
    "looped": ("last_exited", "full", "shared", "deferred", "deferred"),
    "layered": ("full", "deferred", "project"),
}


def draw(
    rng: Random, *, dtype: str = "float64", signals: Sequence[str] = ("sync",), fills: Collection[str] | None = None
) -> Schedule:
    """A random schedule in one of the modes `signals`, with one of the `fills`, which both kinds of model must know
    (None: all that the drawn model knows). `rng` may be hypothesis's, which then shrinks it."""
    mode = rng.choice(list(signals))
    kind = rng.choice(["looped", "looped", "layered"])
    changes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": rng.choice([1, 2]),
        "max_position_embeddings": rng.choice([64, 9, 21]),
        "tie_word_embeddings": rng.choice([False, True]),
        "num_hidden_layers": rng.randint(1, 2) if kind == "looped" else rng.randint(2, 4),
    }
    exits = None
    if kind == "looped":
        changes["total_ut_steps"] = segments = rng.randint(1, 4)
    else:
        last = changes["num_hidden_layers"]
        exits = (*(layer for layer in range(1, last) if rng.choice([True, False])), last)
        segments = len(exits)
    fill = rng.choice([fill for fill in FILLS[kind] if fills is None or fill in fills])
    longest = changes["max_position_embeddings"]
    if (mode, fill) == ("exact", "shared"):
        fill = "last_exited"
    if mode == "resident" and (kind == "layered" or fill == "deferred"):
        mode = "exact"
    asked = tuple(
        _draw_asked(rng, segments, kind == "looped", longest, scores=mode == "sync") for _ in range(rng.randint(1, 6))
    )
    page_size = rng.choice([4, 1, 2, 3, 16])
    needs = [-(-_positions(ask, longest) // page_size) for ask in asked]
    engine = {
        "max_batch": rng.randint(1, 5),
        "page_size": page_size,
        "kv_pages": max(needs) + rng.randint(0, sum(needs) - max(needs)),
        "max_batched_tokens": rng.choice([64, 1, 2, 3, 7]),
        "signals": mode,
        "prefix_sharing": rng.choice([True, True, False]),
    }
    if fill == "deferred":
        engine["pending_positions"] = rng.choice([None, 1, 2, 3, 5])
    late = None if mode == "sync" else rng.getrandbits(32)
    if late is not None:
        padding = mode == "resident" and rng.choice([True, False])
        engine["submission"] = Submission(padding=padding, static_buffers=rng.choice([True, True, False]))
    squeezes = tuple((turn, rng.randint(0, 4)) for turn in range(40) if rng.random() < 0.1) * rng.choice([0, 1])
    eos = tuple(sorted(rng.sample(range(VOCABULARY), rng.randint(0, 2))))
    return Schedule(kind, rng.randint(0, 99), changes, exits, dtype, fill, eos, engine, asked, late, squeezes)


def _draw_asked(rng: Random, segments: int, has_gate: bool, longest: int, *, scores: bool) -> Asked:
    length = rng.choice([rng.randint(1, min(longest, 9)), min(longest, 18)])
    prompt = _ids(rng, length)
    if rng.choice([False, True]):  # one that others begin with too
        prompt = tuple(n * 7 % VOCABULARY for n in range(length - 1)) + prompt[-1:]
    settings: dict[str, Any] = {"max_tokens": rng.randint(1, 10)}
    abort = rng.randint(0, 30) if rng.choice([False, False, False, True]) else None
    forced: tuple[tuple[int, ...], ...] = ()
    if scores and rng.choice([False, False, False, True]):
        room = min(6, longest - length + 1)
        forced = tuple(_ids(rng, rng.randint(1, room)) for _ in range(rng.randint(1, 3)))
    by_policy = bool(forced) or rng.choice([False, True])
    if by_policy and not forced:
        settings["first_token"] = "policy"
    policy = rng.choice(["never", "fixed", "trace", "interval", *["gate"] * 3 * has_gate])
    if policy == "interval":
        settings["interval"] = rng.choice([1, 2, 3, 4]) if segments > 1 else 1
        if settings["interval"] > 1:
            settings["shallow_depth"] = rng.randint(1, segments - 1)
    elif policy == "fixed":
        settings["depth"] = rng.randint(1, segments)
    elif policy == "trace":
        depths = [rng.randint(1, segments) for _ in range(10)]
        settings["trace"] = tuple(depths if by_policy else [segments, *depths[1:]])
    elif policy == "gate":
        low = rng.randint(1, segments)
        settings |= {"exit_policy": "gate_cdf", "exit_threshold": rng.choice([0.5, 0.3, 0.7, 0.0, 0.9, 1.0])}
        settings |= {"min_depth": low, "max_depth": rng.randint(low, segments)}
    if not forced:
        if rng.choice([False, True]):
            settings |= {"temperature": rng.choice([1.0, 0.5, 1e-3, 3.0]), "seed": rng.getrandbits(64)}
            settings |= {"top_k": rng.choice([None, 1, 3, 100]), "top_p": rng.choice([1.0, 0.9, 0.2])}
        if rng.choice([False, True]):
            settings["logprobs"] = rng.choice(["raw", "processed"])
        if rng.choice([False, True]):
            settings["ignore_eos"] = True
        if rng.choice([False, False, True]):
            settings["stop_token_ids"] = (rng.randrange(VOCABULARY),)
        if rng.choice([False, False, True]):
            settings["stop"] = Letters().decode(_ids(rng, rng.randint(1, 2)))
    priority, takes_over = rng.choice([0, 0, 0, 1, -1]), rng.choice([False, False, True])
    return Asked(rng.randint(0, 12), prompt, settings, abort, forced, priority, takes_over)


def _ids(rng: Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(length))


def _positions(ask: Asked, longest: int) -> int:
    """K/V positions a request may need: those of prompt and answer but for the last token."""
    outputs = max(map(len, ask.forced)) if ask.forced else ask.settings["max_tokens"]
    return min(len(ask.prompt) + outputs - 1, longest)


def play(schedule: Schedule, *, with_reference: bool = True) -> Played:
    """Run a schedule to its end, on pages that are NaN when they are handed out, and check what must hold: every
    request equals its lone run (an aborted one is a prefix of it), nothing is held, the work adds up."""
    try:
        return _play(schedule, with_reference)
    except Exception as error:
        error.add_note(f"fails again with: play({schedule!r})")
        raise


def _play(schedule: Schedule, with_reference: bool) -> Played:
    dtype = getattr(torch, schedule.dtype)
    options = {"segments": schedule.segments, "gentle": dtype == torch.float32, **schedule.changes}
    model, reference = twins(schedule.kind, seed=schedule.seed, dtype=dtype, **options)
    tokenizer = Letters() if any("stop" in ask.settings for ask in schedule.asked) else None
    eos = frozenset(schedule.eos_ids)
    engine = poison(Engine(model, tokenizer=tokenizer, fill=schedule.fill, eos_ids=eos, **schedule.engine))
    if schedule.late is not None:
        engine.runner.completions = AdversarialCompletions(schedule.late)
    engine.work, ran_rows = [], [0]
    if schedule.engine.get("signals") == "resident":
        run = engine.runner._run

        def counted(decode, prompts, known):
            ran_rows[0] += int(engine.slots.state.numbers_S8[known.slots_B, 3].sum())
            return run(decode, prompts, known)

        engine.runner._run = counted
    watch = Watch(engine)
    played = Played(run_schedule(engine, schedule))
    played.preempted, played.shared_tokens = engine.scheduler.preempted, engine.pages.shared_tokens
    for one in played.ran:
        one.shared = watch.shared.get(one.request, 0)  # some never ran
    assert_empty(engine)
    _check_work(engine, played.ran, schedule)
    if ran_rows[0]:
        _check_resident(played.ran, ran_rows[0])
    if with_reference:
        for ask, ran in zip(schedule.asked, played.ran, strict=True):
            judge = _judge_scores if ask.forced else _judge_answer
            found = judge(reference, schedule, ask, ran, watch)
            assert all(found), (ask, *(problem for verdict in found for problem in verdict.problems))
            played.verdicts += found
    return played


def _judge_answer(reference: Reference, schedule: Schedule, ask: Asked, ran: Ran, watch: Watch) -> list[Verdict]:
    """What was answered is what the reference answers alone, up to where an abort or a stop string ended it."""
    output = ran.output
    assert output is not None
    if not output.token_ids:
        return []
    mode = schedule.engine.get("signals", "sync")
    settings = {key: value for key, value in ask.settings.items() if key != "stop"}
    if mode == "delayed":
        settings["delayed"] = True
    lone = expected(reference, (ask.prompt, settings), fill=schedule.fill, eos_ids=schedule.eos_ids)
    stops = _first_stop(lone, ask)
    if ran.aborted or stops is not None:
        assert ran.aborted or (output.finish_reason, len(output.token_ids)) == ("stop", stops), (output, stops)
        lone = shortened(lone, len(output.token_ids))
        output = replace(output, finish_reason="abort")  # its ending and usage are not the lone run's
    assert mode != "resident" or "stop" in ask.settings or ran.aborted or output.usage.segments_wasted == 0
    first = ask.settings.get("first_token") != "policy"
    depths = ran_depths(schedule, ask, lone.depths[first:], reference.segments)
    seen = watch.answer(ran.request, output)
    if schedule.fill == "deferred":
        seen.plane_depths = [reference.segments] * (len(ask.prompt) - (not first)) + depths
    return [compare(lone, seen, executed=sum(depths))]


def ran_depths(schedule: Schedule, ask: Asked, depths: Sequence[int], segments: int) -> list[int]:
    """How deep each decode row has run that was read at one of `depths`."""
    high = ask.settings.get("max_depth", segments)
    if schedule.engine.get("signals") == "exact" and ask.settings.get("exit_policy") == "gate_cdf":
        depths = [min(depth + 1, high) for depth in depths]  # the late round
    if schedule.fill == "full":
        return [segments] * len(depths)
    if schedule.fill != "deferred":
        return list(depths)
    most = schedule.engine["pending_positions"]
    longest = schedule.changes["max_position_embeddings"]
    return deferred_depths(depths, most=most, deepest=_deepest(ask, segments, longest))


def _deepest(ask: Asked, segments: int, longest: int) -> int:
    """The deepest segment that any decode token of it may need."""
    settings = ask.settings
    first = not ask.forced and settings.get("first_token") != "policy"
    outputs = max(map(len, ask.forced)) if ask.forced else min(settings["max_tokens"], longest - len(ask.prompt) + 1)
    if "trace" in settings:
        return max(settings["trace"][first:outputs], default=1)
    if "interval" in settings:
        numbers = range(1, outputs + (not first))
        return max(
            (segments if i % settings["interval"] == 0 else settings["shallow_depth"] for i in numbers), default=1
        )
    if "depth" in settings:
        return settings["depth"]
    return settings.get("max_depth", segments) if settings.get("exit_policy") == "gate_cdf" else segments


def _first_stop(lone: Result, ask: Asked) -> int | None:
    """Tokens until the answer's text holds its stop string; None where a stop id or its length ends it before."""
    text = Letters().decode(lone.token_ids[: len(lone.token_ids) - (lone.finish_reason == "stop")])
    at = text.find(ask.settings["stop"]) if "stop" in ask.settings else -1
    return at + len(ask.settings["stop"]) if at >= 0 else None


def _judge_scores(reference: Reference, schedule: Schedule, ask: Asked, ran: Ran, watch: Watch) -> list[Verdict]:
    assert ran.output is not None
    found, logits = [], iter(watch.logits[ran.request])
    settings = {name: value for name, value in ask.settings.items() if name != "max_tokens"}
    for target, got, planes in zip(ask.forced, ran.scores, watch.planes[ran.request], strict=False):
        lone = score(reference, ask.prompt, target, fill=schedule.fill, **settings)
        depths = ran_depths(schedule, ask, lone.depths, reference.segments)
        fields = {name: getattr(got, name) for name in ("logprobs", "depths", "greedy", "usage")}
        seen = SimpleNamespace(**fields, logits=[next(logits) for _ in target], planes=planes)
        if schedule.fill == "deferred":
            seen.plane_depths = [reference.segments] * (len(ask.prompt) - 1) + depths
        found.append(compare(lone, seen, executed=sum(depths)))
    return found


def run_schedule(engine: Engine, schedule: Schedule) -> list[Ran]:
    """Step until all has come and gone."""
    asked = schedule.asked
    ran, waiting, turn = [Ran() for _ in asked], dict(enumerate(asked)), 0
    names = [str(n) for n in range(len(asked))]  # the id of each; one that takes over has its forerunner's

    def submit(n: int) -> None:
        ask = waiting.pop(n)
        sampling = Sampling(**ask.settings)
        request = engine.prepare(ask.prompt, sampling, id=names[n], forced=ask.forced, priority=ask.priority)
        ran[n].request = engine.submit(request)

    while waiting or not engine.idle:
        assert turn < PATIENCE, f"still running after {turn} turns: {list(engine.scheduler.running)}"
        for n, ask in enumerate(asked):
            if n in waiting and ask.arrival <= turn and names[n] not in engine.scheduler.sequences:
                submit(n)
            if ask.abort == turn and n not in waiting:
                engine.abort(names[n])
                if n + 1 in waiting and asked[n + 1].takes_over and names[n] not in engine.scheduler.sequences:
                    names[n + 1] = names[n]
                    submit(n + 1)
        for when, which in schedule.squeezes:
            if when == turn and (running := list(engine.scheduler.running.values())):
                engine.scheduler.preempt(running[which % len(running)])
        for chunk in engine.step():
            # Of several with one id, the earliest that has not ended: its last chunk comes before any of the next.
            one = next(ran[n] for n, name in enumerate(names) if name == chunk.request_id and ran[n].output is None)
            one.streamed += [(chunk.token_id, chunk.depth)] * (chunk.token_id is not None)
            one.scores += [chunk.score] * (chunk.score is not None)
            one.output = chunk.output
        turn += 1
    for ask, one in zip(asked, ran, strict=True):
        assert one.output is not None and (not one.aborted or ask.abort is not None)
        assert ask.forced or one.streamed == list(zip(one.output.token_ids, one.output.depths, strict=True))
        assert one.aborted or len(one.scores) == len(ask.forced)
    return ran


def _check_work(engine: Engine, ran: list[Ran], schedule: Schedule) -> None:
    """What the requests say they cost is what the turns say they ran, and what follows from their depths."""
    work, usages = engine.work or [], [u for one in ran for u in one.usages]
    total = sum(usages, Usage(segments_wasted=0))
    assert engine.stats()["usage"] == {name: getattr(total, name) for name in Usage.__slots__}
    assert all(turn.prefill_rows <= schedule.engine["max_batched_tokens"] for turn in work)
    caught_up = schedule.engine["max_batched_tokens"] if schedule.fill == "deferred" else 0
    assert all(turn.decode_rows <= schedule.engine["max_batch"] + caught_up for turn in work)
    rows = sum(turn.decode_rows for turn in work), sum(turn.prefill_rows for turn in work)
    ran_in_all = total.segments_executed + total.segments_prefill + total.segments_wasted
    # Where rows end on the device the host plans some that do not run.
    assert sum(rows) >= ran_in_all if schedule.engine.get("signals") == "resident" else sum(rows) == ran_in_all
    if schedule.engine.get("signals", "sync") != "sync":
        assert sum(turn.readout_rows for turn in work) >= total.output_tokens
        return
    assert rows == (total.segments_executed, total.segments_prefill) and total.segments_wasted == 0
    assert sum(turn.readout_rows for turn in work) == total.output_tokens
    if not any(one.aborted for one in ran):  # what an abort cuts short is run, but not read
        _check_depths(engine, ran, schedule, total)


def _check_resident(ran: list[Ran], rows: int) -> None:
    """Rows that really ran on the device: as many as were executed, and no more where the device itself saw the end."""
    total = sum((usage for one in ran for usage in one.usages), Usage(segments_wasted=0))
    assert total.segments_executed <= rows <= total.segments_executed + total.segments_wasted


def _check_depths(engine: Engine, ran: list[Ran], schedule: Schedule, total: Usage) -> None:
    """What follows from the depths alone: segments read, copies, and how much was attended to."""
    work, segments = engine.work or [], engine.model.shape.segments
    read, copies, attended = 0, Counter[int](), 0
    for ask, one in zip(schedule.asked, ran, strict=True):
        free = not ask.forced and ask.settings.get("first_token") != "policy"  # the first token came from the prefill
        prefilled, shared = len(ask.prompt) - (not free), one.shared
        attended += segments * (prefilled * (prefilled + 1) - shared * (shared + 1)) // 2
        for depths in one.decoded:
            executed = ran_depths(schedule, ask, depths[free:], segments)
            read += sum(depths[free:])
            copies.update(
                depth for depth in executed if depth < segments and schedule.fill in ("last_exited", "project")
            )
            attended += sum(count * (prefilled + n) for n, count in enumerate(executed, start=1))
    assert total.segments_read == read
    assert Counter(depth for turn in work for depth in turn.copies) == copies
    assert sum(turn.attended for turn in work) == attended
