"""A certificate holds what it says and nothing else: the file, the model it is for, the requests under it."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

import pytest

from anydepth import LLM, Sampling
from anydepth.certificate import DRAW_SETTINGS, EXIT_SETTINGS, Certificate, describe
from tests.random_nano import write_random_nano

PROMPT = "Ann has 5 . Bob has 3 more than Ann . Eve has as many as Bob . How many has Eve ?"
HALF = {"exit_threshold": 0.5, "min_depth": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_nano(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(folder):
    return LLM(folder)


@pytest.fixture(scope="module")
def certificate(plain):
    return Certificate(
        model_hash=plain.checkpoint.model_hash,
        head_hash=None,
        policy={"exit_policy": "gate_cdf", "max_depth": 4, "depth": None, "trace": None, "segments": 4},
        fill="last_exited",
        signals="sync",
        dtype="float32",
        gate_dtype="float32",
        sampling={"temperature": 0.0, "top_k": None, "top_p": 1.0, "first_token": "prefill"},
        protocol_hash="p",
        loss="lost",
        grid=({"exit_threshold": 0.9, "min_depth": 1}, HALF),
        n=600,
        eps=0.05,
        delta=0.05,
        method="ltt",
        points=(
            {"n": 600, "losses": 2.0, "unscored": 0, "p": 1e-10},
            {"n": 600, "losses": 12.0, "unscored": 0, "p": 0.00056},
        ),
        chosen=HALF,
        fitted_on=None,
        certified_on="c",
        seed=0,
        made_by={"version": "0.1.0"},
    )


@pytest.fixture(scope="module")
def held(folder, certificate):
    return LLM(folder, certificate=certificate)


# -- the file --------------------------------------------------------------------------------------------------------


def test_round_trip(certificate, tmp_path):
    path = tmp_path / "certificate.json"
    certificate.write(path)
    assert Certificate.read(path) == certificate and Certificate.read(str(path)).sha256 == certificate.sha256
    wanted = (
        "version model_hash head_hash policy fill signals dtype gate_dtype sampling protocol_hash loss grid n eps "
        "delta method points chosen fitted_on certified_on seed made_by sha256"
    )
    assert json.loads(path.read_bytes()).keys() == set(wanted.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["chosen"].update(exit_threshold=0.2), "was edited after it was made"),
        (lambda c: c["points"][1].update(p=0.01), "was edited after it was made"),
        (lambda c: c.update(fill="full"), "was edited after it was made"),
        (lambda c: c.update(version=2), "has version 2; this anydepth reads 1"),
        (lambda c: c.pop("version"), "is no certificate"),
        (lambda c: c.pop("loss"), "lacks or has beyond version 1: loss"),
        (lambda c: c.update(more=1), "lacks or has beyond version 1: more"),
    ],
)
def test_refuses_a_file_that_is_not_as_it_was_written(certificate, tmp_path, change, message):
    path = tmp_path / "certificate.json"
    certificate.write(path)
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*" + message):
        Certificate.read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "7"])
def test_refuses_what_is_no_certificate(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=r"c\.json is no certificate"):
        LLM("nano", certificate=tmp_path / "c.json")
    with pytest.raises(ValueError, match=r"there is no certificate .*d\.json; make one"):
        LLM("nano", certificate=tmp_path / "d.json")


def test_what_was_not_tried_cannot_be_chosen(certificate):
    with pytest.raises(ValueError, match=r"chosen is .*0\.3.*; allowed: one of the grid, or 'never'"):
        replace(certificate, chosen={"exit_threshold": 0.3, "min_depth": 1})


# -- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fill": "full"}, "fill is 'full', not 'last_exited'"),
        ({"dtype": "float64"}, "dtype is 'float64', not 'float32'"),
        ({"gate_dtype": "bfloat16"}, "gate_dtype is 'bfloat16', not 'float32'"),
        ({"fill": "shared", "dtype": "float64"}, "fill is 'shared', not 'last_exited'; dtype is 'float64'"),
    ],
)
def test_refuses_other_options_naming_each_difference(folder, certificate, options, message):
    with pytest.raises(ValueError, match=f"the certificate is for something else: {message}"):
        LLM(folder, certificate=certificate, **options)


def test_refuses_another_model(plain, certificate):
    with pytest.raises(ValueError, match=f"model_hash is '[0-9a-f]+', not '{certificate.model_hash}'"):
        LLM("nano-plain", certificate=certificate)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"signals": "exact"}, None),
        ({"signals": "resident"}, None),
        ({"signals": "delayed"}, "signals is 'delayed', not 'sync'"),
        ({"head_hash": "h"}, "head_hash is 'h', not None"),
        ({"segments": 8}, "segments is 8, not 4"),
    ],
)
def test_signals_that_change_no_token_count_as_sync(certificate, changes, message):
    here = {name: getattr(certificate, name) for name in ("fill", "signals", "dtype", "gate_dtype")}
    here |= {"model_hash": certificate.model_hash, "head_hash": None, "segments": 4, **changes}
    if message is None:
        certificate.match(**here)
    else:
        with pytest.raises(ValueError, match=message):
            certificate.match(**here)


# -- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, HALF, {"exit_policy": "gate_cdf", "exit_threshold": 0.5, "max_depth": 4}])
def test_a_request_gets_the_certified_setting(plain, held, given):
    """The same tokens and depths as an engine without a certificate gives for that setting, and other ones than at full
    depth."""
    (wanted,) = plain.generate(PROMPT, Sampling(max_tokens=12, **HALF))
    (output,) = held.generate(PROMPT, Sampling(max_tokens=12, **given))
    assert (output.token_ids, output.depths) == (wanted.token_ids, wanted.depths)
    assert set(output.depths[1:]) != {4}
    assert held.certificate == held.engine.requests.certificate


def test_streams_and_scores_keep_to_it_too(plain, held):
    streamed = [chunk.depth for chunk in held.stream(PROMPT, Sampling(max_tokens=12))]
    assert streamed == [chunk.depth for chunk in plain.stream(PROMPT, Sampling(max_tokens=12, **HALF))]
    (score,), (wanted,) = held.score(PROMPT, " Eve has 8"), plain.score(PROMPT, " Eve has 8", Sampling(**HALF))
    assert score == wanted and set(score.depths) != {4}
    assert held.generate(PROMPT)[0].depths == plain.generate(PROMPT, Sampling(**HALF))[0].depths


REFUSED = [
    ({"exit_threshold": 0.4}, "exit_threshold is 0.4, certified is 0.5"),
    ({"exit_threshold": 0.9}, "exit_threshold is 0.9, certified is 0.5"),
    ({"min_depth": 2}, "exit_policy is 'never', certified is 'gate_cdf'"),
    ({"exit_threshold": 0.5, "min_depth": 2}, "min_depth is 2, certified is 1"),
    ({"exit_threshold": 0.5, "max_depth": 3}, "max_depth is 3, certified is 4"),
    ({"exit_policy": "never"}, "exit_policy is 'never', certified is 'gate_cdf'"),
    ({"depth": 4}, "exit_policy is 'fixed', certified is 'gate_cdf'"),
    ({"trace": [4] * 64}, "exit_policy is 'trace', certified is 'gate_cdf'"),
    ({"temperature": 0.7}, "temperature is 0.7, certified is 0.0"),
    ({"top_k": 5}, "top_k is 5, certified is None"),
    ({"top_p": 0.9}, "top_p is 0.9, certified is 1.0"),
    ({"first_token": "policy"}, "first_token is 'policy', certified is 'prefill'"),
    ({"exit_threshold": 0.5, "temperature": 1.0}, "temperature is 1.0, certified is 0.0"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_refuses_another_setting(held, given, message):
    sampling = Sampling(**given)
    for ask in (held.generate, held.stream, lambda p, s: held.score(p, " Eve", s), held.engine.prepare):
        with pytest.raises(ValueError, match=message):
            ask(PROMPT, sampling)
    assert held.engine.idle


def test_where_nothing_was_certified_every_token_runs_at_full_depth(folder, certificate):
    llm = LLM(folder, certificate=replace(certificate, chosen="never"))
    for given in ({}, {"exit_policy": "never"}, {"exit_policy": "never", "max_depth": 4}):
        assert set(llm.generate(PROMPT, Sampling(max_tokens=8, **given))[0].depths) == {4}
    with pytest.raises(ValueError, match=r"exit_threshold is 0\.5, certified is 1\.0|exit_policy is 'gate_cdf'"):
        llm.generate(PROMPT, Sampling(**HALF))


def test_a_certified_temperature_must_be_asked_for(folder, certificate):
    llm = LLM(folder, certificate=replace(certificate, sampling={"temperature": 1.0, "top_k": None, "top_p": 1.0}))
    assert set(llm.generate(PROMPT, Sampling(max_tokens=12, temperature=1.0, seed=1))[0].depths[1:]) != {4}
    with pytest.raises(ValueError, match=r"temperature is 0\.0, certified is 1\.0; .* keep to temperature 1\.0"):
        llm.generate(PROMPT)


def test_every_field_of_sampling_is_certified_or_free():
    """A new field that decides depth or what is drawn belongs into EXIT_SETTINGS or DRAW_SETTINGS."""
    free = {"max_tokens", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "logprobs"}
    assert {field.name for field in fields(Sampling)} == {*EXIT_SETTINGS, *DRAW_SETTINGS} | free


# -- in words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "certified: gate_cdf exit_threshold 0.5, min_depth 1: on at most 5 % of questions full depth is right and "
            "early exit wrong, with 95 % confidence (n 600, losses 12, p 0.00056; fill last_exited, float32, "
            "temperature 0)",
        ),
        (
            {"chosen": "never", "loss": "wrong", "delta": 0.1},
            "nothing certified, every token runs at full depth: not even for exit_threshold 0.9, min_depth 1 was it "
            "shown that on at most 5 % of questions early exit is wrong, with 90 % confidence (n 600, losses 2, "
            "p 1e-10; fill last_exited, float32, temperature 0)",
        ),
        (
            {
                "delta": None,
                "loss": "disagree",
                "grid": (HALF,),
                "points": ({"n": 600, "losses": 9.5, "unscored": 2, "p": None},),
            },
            "certified: gate_cdf exit_threshold 0.5, min_depth 1: on at most 5 % of questions early exit does not "
            "answer as full depth does, in expectation (n 600, losses 9.5, 2 of them unscored; fill last_exited, "
            "float32, temperature 0)",
        ),
        (
            {
                "loss": "disagree_tokens",
                "policy": {"exit_policy": "probe", "segments": 4},
                "grid": ({"profile": "probe-0.9"},),
                "chosen": {"profile": "probe-0.9"},
                "points": ({"n": 600, "losses": 9.5, "unscored": 0, "p": 0.01, "profile_hash": "s"},),
                "fill": "project",
            },
            "certified: probe profile probe-0.9: on at most 5 % of an answer's tokens, on average, early exit says "
            "another token than full depth, with 95 % confidence (n 600, losses 9.5, p 0.01; fill project, float32, "
            "temperature 0)",
        ),
    ],
)
def test_describe(certificate, changes, line):
    assert describe(replace(certificate, **changes)) == line
