"""The ladder names the rung in which a fault was planted, and no rung for what a tie explains. Runs are nano's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anydepth.diagnose.bisect import (
    EQUAL,
    FAULT,
    LATER,
    MISSING,
    REFUSED,
    TIES,
    Rung,
    bisect,
    ladder,
)
from anydepth.diagnose.divergence import diagnose
from anydepth.diagnose.judge import Replayer
from anydepth.engine.llm import LLM
from anydepth.eval.task import load_task
from anydepth.models.load import load_checkpoint
from anydepth.types import Sampling

ASK = Sampling(exit_threshold=0.5, max_tokens=16)
SETTINGS = {"policy": "gate_cdf", "exit_threshold": 0.5, "min_depth": 1, "max_depth": 4, "fill": "last_exited"}
KV = ("last_exited", "last_exited")
FIRST, RUNGS = ladder({"exit_threshold": 0.5}, {"exit_threshold": 0.5}, concurrency=4)
NAMES = [rung.name for rung in RUNGS]
HERE = [replace(rung, missing=lambda settings: None) for rung in RUNGS]
SPARE = 75  # nano's last id


@pytest.fixture(scope="module")
def models():
    """nano in both dtypes, its last id read as its likeliest fourth word is: a near-tie there is one of two twins."""
    llm = LLM("nano", max_batch=4)
    word = llm.generate(prompts()[:1], ASK)[0].token_ids[3]
    found = {}
    for dtype in ("float32", "float64"):
        found[dtype] = load_checkpoint("nano", dtype=dtype).model
        found[dtype].head[:, SPARE] = found[dtype].head[:, word] * (1 - 1e-7)
    return found


def prompts():
    return [question.prompt for question in load_task("nano").select(limit=4)]


class Runner:
    """Runs every rung on the plain engine, at its own batch size and dtype, and plants a change in one of them."""

    def __init__(self, models, planted=None, change=None):
        self.models, self.planted, self.change, self.ran = models, planted, change, []

    def __call__(self, settings, name):
        self.ran.append((name, settings))
        llm = LLM("nano", max_batch=settings["concurrency"], dtype=settings.get("dtype"))
        llm.engine.runner.model = llm.engine.model = self.models[settings.get("dtype", "float32")]
        outputs = [replace(o, request_id=str(o.prompt_index)) for o in llm.generate(prompts(), ASK)]
        return [self.change(outputs[0]), *outputs[1:]] if name == self.planted else outputs

    def hold(self, one, x, other, y):
        dtypes = dict.fromkeys((one.get("dtype", "float32"), other.get("dtype", "float32")))
        at_a_time = max(one["concurrency"], other["concurrency"])
        models = tuple(self.models[dtype] for dtype in dtypes)
        judge = Replayer(models=models, settings=SETTINGS, answers=x, concurrency=at_a_time)
        return diagnose(x, y, judge=judge, segments=4, kv=KV)


def flip(to):
    return lambda output: replace(output, token_ids=(*output.token_ids[:3], to, *output.token_ids[4:]))


def walk(runner, rungs=HERE):
    return bisect(runner, FIRST, rungs, hold=runner.hold)


@pytest.mark.parametrize("planted", NAMES)
def test_a_fault_planted_in_any_rung_is_named_by_it(models, planted):
    runner = Runner(models, planted, flip(5))
    found = walk(runner)
    assert found.named == planted
    at = NAMES.index(planted) + 1
    assert [step.status for step in found.steps] == [EQUAL] * at + [FAULT] + [LATER] * (len(NAMES) - at)
    assert [name for name, _ in runner.ran] == ["sync", *NAMES[:at]]


@pytest.mark.parametrize("planted", ["padding", "dtype"])
def test_what_flips_a_near_tie_only_is_not_named(models, planted):
    found = walk(Runner(models, planted, flip(SPARE)))
    assert found.named is None
    assert {step.name: step.status for step in found.steps if step.status != EQUAL} == {planted: TIES}


def test_settings_add_up_but_for_those_of_rungs_that_did_not_run(models):
    def refuse(settings, name):
        if name == "static buffers":
            raise ValueError("exact is not for this fill; leave it out")
        return runner(settings, name)

    runner = Runner(models)
    rungs = [replace(r, missing=lambda s: "no such device") if r.name == "graphs" else r for r in HERE]
    found = bisect(refuse, FIRST, rungs, hold=runner.hold)
    told = {step.name: (step.status, step.because) for step in found.steps}
    assert told["graphs"] == (MISSING, "no such device")
    assert told["static buffers"] == (REFUSED, "exact is not for this fill; leave it out")
    name, settings = runner.ran[-1]
    assert name == "dtype" and settings == {
        "exit_threshold": 0.5,
        "signals": "exact",
        "lateness": 1,
        "static_buffers": False,
        "streams": 2,
        "padding": True,
        "concurrency": 1,
        "dtype": "float64",
    }


def test_errors_of_the_first_rung_are_the_callers():
    def refuse(settings, name):
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        bisect(refuse, FIRST, HERE, hold=lambda *_: None)


@pytest.mark.parametrize(
    ("a", "b", "first", "adds"),
    [
        ({}, {}, {"concurrency": 4, "signals": "sync"}, ({"signals": "exact", "lateness": 1}, 1, "float64")),
        (
            {"signals": "sync", "concurrency": 1},
            {"signals": "resident", "lateness": 2, "concurrency": 8},
            {"concurrency": 1, "signals": "sync"},
            ({"signals": "resident", "lateness": 2}, 8, "float64"),
        ),
        (
            {"signals": "delayed", "dtype": "float64", "streams": 1},
            {"signals": "delayed"},
            {"concurrency": 4, "dtype": "float64", "signals": "delayed", "lateness": 0},
            ({"signals": "delayed", "lateness": 1}, 1, "float32"),
        ),
        ({"concurrency": 1}, {"dtype": "bfloat16"}, {"concurrency": 1, "signals": "sync"}, (None, 32, "bfloat16")),
    ],
)
def test_the_ladder_leads_from_a_towards_b(a, b, first, adds):
    start, rungs = ladder(a, b, concurrency=4)
    signals, batch, dtype = adds
    assert start == first and (signals is None or rungs[0].adds == signals | {"static_buffers": False})
    assert rungs[-2].adds == {"concurrency": batch} and rungs[-1].adds == {"dtype": dtype}


def test_rungs_that_need_what_this_machine_lacks_say_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    for rung in (rung for rung in RUNGS if rung.name in ("more streams", "graphs")):
        assert rung.missing(FIRST) == "there is no CUDA device"
    assert Rung(name="any", adds={}).missing({}) is None
