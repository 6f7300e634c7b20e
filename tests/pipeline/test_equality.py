"""A pipeline answers what one engine answers, wherever its workers are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from anydepth.pipeline.export import export_segments
from anydepth.pipeline.manifest import read_manifest
from anydepth.pipeline.worker import Worker
from anydepth.types import Sampling
from tests.engine.schedules import Letters
from tests.models.checkpoints import write_folder
from tests.pipeline.making import (
    asks,
    assert_nothing_held,
    assert_same,
    engine_answers,
    made,
    outputs_of,
    prepared,
    router_of,
)

CUTS = {
    "one": [(1, 2, 3, 4)],
    "two": [(1, 2), (3, 4)],
    "three": [(1,), (2, 3), (4,)],
    "four": [(1,), (2,), (3,), (4,)],
}


@pytest.fixture
def poisoned(monkeypatch):
    """Pages of threads' workers hold NaN when they are handed out."""
    seat = Worker._seat

    def seated(self, given):
        seat(self, given)
        pool = self.map.pool
        pool.data[:, :, self.map.storage(self.tenants[given.key].pages)] = float("nan")

    monkeypatch.setattr(Worker, "_seat", seated)


def assert_equal_to_engine(manifest, folder, asked, **options):
    wanted = engine_answers(manifest, asked)
    with router_of(manifest, folder, **options) as router:
        got = outputs_of(router.run(prepared(router, asked)))
        assert got.keys() == wanted.keys()
        for id, output in got.items():
            assert_same(output, wanted[id])
        assert_nothing_held(router)
    return wanted


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("fill", ["full", "deferred", "project"])
def test_threads_answer_as_the_engine(tmp_path, poisoned, fill, cut):
    manifest = made(tmp_path, *((own, "here") for own in CUTS[cut]), heads=True, fill=fill)
    wanted = assert_equal_to_engine(manifest, tmp_path, asks(Random(f"{fill}{cut}"), 40, heads=True))
    depths = {depth for output in wanted.values() for depth in output.depths}
    assert depths == {1, 2, 3, 4} and {"stop", "length"} == {output.finish_reason for output in wanted.values()}


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"num_key_value_heads": 4}])
def test_other_shapes_without_heads(tmp_path, poisoned, changes):
    manifest = made(tmp_path, *((own, "here") for own in CUTS["two"]), changes=changes)
    assert_equal_to_engine(manifest, tmp_path, asks(Random(3), 20))


@pytest.mark.parametrize("own", ["Confident", "Positive"])
def test_a_policy_of_somebodys_own(tmp_path, own):
    manifest = made(tmp_path, *((own, "here") for own in CUTS["three"]))
    asked = [([n, n + 1], {"max_tokens": 8, "exit_policy": f"tests.exits.own:{own}"}) for n in range(8)]
    wanted = assert_equal_to_engine(manifest, tmp_path, asked)
    assert len({depth for output in wanted.values() for depth in output.depths}) > 1


@pytest.mark.parametrize("places", [("process", "process"), ("process", "here")])
def test_processes_answer_as_the_engine(tmp_path, places):
    fill = {"process": "deferred", "here": "full"}[places[1]]
    manifest = made(tmp_path, *zip(CUTS["two"], places), heads=True, fill=fill)
    assert_equal_to_engine(manifest, tmp_path, asks(Random(4), 40, heads=True))


def test_the_example_runs_on_a_tiny_model(tmp_path):
    """Eight segments of four layers."""
    manifest = read_manifest(Path(__file__).parents[2] / "examples" / "llama-3.1-8b.toml")
    assert [stage.segments for stage in manifest.stages] == [(n,) for n in range(1, 9)]
    assert manifest.segments == (4, 8, 12, 16, 20, 24, 28, 32)
    write_folder(tmp_path / "model", num_hidden_layers=32)
    stages = tuple(replace(stage, place="here", device=("cpu",)) for stage in manifest.stages)
    manifest = replace(manifest, model=str(tmp_path / "model"), heads=None, dtype="float64", stages=stages)
    export_segments(manifest, tmp_path / "parts")
    assert_equal_to_engine(manifest, tmp_path, asks(Random(5), 12, segments=8))


def test_stop_strings_and_text(tmp_path):
    manifest = made(tmp_path, *((own, "here") for own in CUTS["two"]), changes={"vocab_size": 19})
    asked = [([n, 3, 4], {"max_tokens": 12, "stop": [chr(ord("a") + n)], "depth": 2}) for n in range(12)]
    wanted = engine_answers(manifest, asked, tokenizer=Letters())
    assert any(output.finish_reason == "stop" for output in wanted.values())
    with router_of(manifest, tmp_path, tokenizer=Letters()) as router:
        for id, output in outputs_of(router.run(prepared(router, asked))).items():
            assert_same(output, wanted[id])


def test_an_abort_frees_what_is_held_and_others_go_on(tmp_path, poisoned):
    manifest = made(tmp_path, *((own, "here") for own in CUTS["two"]), max_batch=3)
    asked = [([n + 1, n], {"max_tokens": 40, "depth": 2, "ignore_eos": True}) for n in range(8)]
    wanted = engine_answers(manifest, asked)
    with router_of(manifest, tmp_path) as router:
        for request in prepared(router, asked):
            router.submit(request)
        seen, got = 0, {}
        while not router.idle:
            for chunk in router.step():
                seen += 1
                if chunk.output is not None:
                    got[chunk.request_id] = chunk.output
                if seen == 10:
                    assert router.abort("0") and router.abort("7") and not router.abort("nobody")
        assert {id for id, output in got.items() if output.finish_reason == "abort"} == {"0", "7"}
        assert got["0"].token_ids == wanted["0"].token_ids[: len(got["0"].token_ids)] and got["7"].token_ids == ()
        for id in map(str, range(1, 7)):
            assert_same(got[id], wanted[id])
        assert_nothing_held(router)


def test_a_closed_run_aborts_what_is_left(tmp_path):
    manifest = made(tmp_path, *((own, "here") for own in CUTS["two"]))
    with router_of(manifest, tmp_path) as router:
        chunks = router.run(prepared(router, [([1, 2], {"max_tokens": 30, "ignore_eos": True})] * 3))
        next(chunks)
        chunks.close()
        assert_nothing_held(router)


def test_a_gate_that_is_asked_is_tallied(tmp_path):
    manifest = made(tmp_path, *((own, "here") for own in CUTS["two"]), heads=True)
    with router_of(manifest, tmp_path) as router:
        list(router.run(prepared(router, [([1, 2], {"max_tokens": 8, "exit_policy": "confidence"})])))
        stayed = [held["tallies"].get("stayed", 0) for held in router.stats()]
    assert sum(stayed) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 2}, r"depths \[2\].*allowed: \[1, 4\]"),
        ({"exit_policy": "probe"}, r"depths \[2, 3\]"),
        ({"max_tokens": 400}, "raise kv_pages"),
        ({"max_depth": 5}, "max_depth is 5"),
        ({"n": 2}, "n is 2"),
    ],
)
def test_what_the_artifacts_cannot_do_is_refused_at_admission(tmp_path, settings, message):
    manifest = made(
        tmp_path, ((1, 2, 3, 4), "here"), heads=True, readouts=(1, 4), changes={"max_position_embeddings": 512}
    )
    with router_of(manifest, tmp_path) as router:
        with pytest.raises(ValueError, match=message):
            router.submit([1, 2], Sampling(**settings))
        got = outputs_of(router.run(prepared(router, [([1, 2], {"depth": 1, "max_tokens": 3})])))
        assert set(got["0"].depths) == {1, 4}
