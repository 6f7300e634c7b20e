"""Thresholds keep the agreement they were chosen for, stricter ones never leave earlier, and idle gates are told."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anydepth.calibrate.fit import LEVELS, fit_exits
from anydepth.calibrate.gates import gates, show_gates, summary
from anydepth.calibrate.gather import TEMPERATURES, cross_entropies, least
from anydepth.calibrate.table import TESTS, Table, walk
from anydepth.calibrate.write import profile_text, write_profile
from anydepth.exits.confidence import scores
from anydepth.profile import Exit, Profile
from tests.calibrate.making import table

POLICIES = ("confidence", "probe")
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=False, database=None, print_blob=True)
PUBLISHED = Path(__file__).resolve().parents[2] / "examples/profiles/llama-3.1-8b-dolly.toml"


def profile(exits: tuple[Exit, ...]) -> Profile:
    return Profile(name="p", exits=exits)


@pytest.mark.parametrize("policy", POLICIES)
@EXAMPLES
@given(seed=st.integers(0, 10**6), levels=st.lists(st.sampled_from([0.5, 0.7, 0.8, 0.9, 0.95, 1.0]), min_size=2))
def test_rows_leave_no_earlier_under_a_stricter_level(policy, seed, levels):
    rows = table(seed)
    fitted = fit_exits(rows, policy, levels, least_rows=5)
    other = table(seed + 1)  # nothing was fitted on it
    for found in (rows, other):
        before = None
        for level in sorted(fitted):  # the laxest first
            left = walk(found, profile(fitted[level]), policy).left_R
            assert before is None or (left >= before).all()
            before = left


@pytest.mark.parametrize("policy", POLICIES)
@EXAMPLES
@given(seed=st.integers(0, 10**6))
def test_rows_that_leave_agree_as_often_as_was_asked_and_are_enough(policy, seed):
    rows = table(seed)
    for level, exits in fit_exits(rows, policy, (0.99, 0.9, 0.8), least_rows=20).items():
        found = {gate["layer"]: gate for gate in gates(rows, profile(exits), policy)}
        for exit in exits:
            assert found[exit.layer]["left"] >= 20 and found[exit.layer]["agreement"] >= level


def test_the_laxest_threshold_is_taken():
    """Among a thousand of a probe, none below lets more rows go at that agreement."""
    rows = table(3, exits=1)
    (exit,) = fit_exits(rows, "probe", (0.8,))[0.8]
    wanted = gates(rows, profile((exit,)), "probe")[0]["left"]
    for limit in np.linspace(0, exit.probe, 1000, endpoint=False):
        (gate,) = gates(rows, profile((Exit(layer=5, probe=float(limit)),)), "probe")
        assert gate["left"] == wanted or gate["agreement"] < 0.8


def test_an_exit_that_reaches_no_level_is_left_out():
    rows = table(1)
    never = replace(rows, agrees_RE=rows.agrees_RE & (np.arange(3) != 1))
    for policy in POLICIES:
        layers = {exit.layer for exits in fit_exits(never, policy).values() for exit in exits}
        assert layers == {5, 15} or layers == {15}
    assert set(fit_exits(replace(rows, agrees_RE=rows.agrees_RE & False), "probe").values()) == {()}
    assert fit_exits(replace(rows, probe_RE=rows.probe_RE * np.nan), "probe", (0.9,)) == {0.9: ()}


def test_rows_whose_head_declines_do_not_leave():
    rows = table(2)
    shut = replace(rows, answers_RE=rows.answers_RE & (np.arange(3) > 0))
    everything = profile(tuple(Exit(layer=layer, probe=0.0) for layer in rows.layers))
    found = gates(shut, everything, "probe")
    assert (found[0]["left"], found[0]["declined"], found[1]["asked"]) == (0, len(rows), len(rows))


def test_a_test_kept_a_row_alone_where_the_others_let_it_go():
    """Five rows: all pass; the logit fails; logit and margin fail; all fail; all pass but the head declines."""
    rows = table(exits=1, rows=5)
    column = np.array([[1.0], [0.0], [0.0], [0.0], [1.0]])
    rows = replace(
        rows,
        logit_RE=column,
        margin_RE=np.array([[1.0], [1.0], [0.0], [0.0], [1.0]]),
        entropy_RE=np.array([[0.5], [0.5], [0.5], [3.0], [0.5]]),
        agrees_RE=column > 0,
        answers_RE=np.arange(5)[:, None] < 4,
    )
    (found,) = gates(rows, profile((Exit(layer=5, logit=1.0, margin=1.0, entropy=0.5),)), "confidence")
    assert found == {
        "layer": 5,
        "asked": 5,
        "left": 1,
        "agreement": 1.0,
        "declined": 1,
        "kept_alone": {"logit": 1, "margin": 0, "entropy": 0},
        "idle": ["margin", "entropy"],
    }


@pytest.mark.parametrize("planted", [0.5, 1.0, 2.3])
def test_the_gate_temperature_is_the_one_that_was_planted(planted):
    draw = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(20_000, 30, generator=draw)
    targets = torch.multinomial(z.softmax(1), 1, generator=draw)[:, 0]
    told = planted * z
    own = told.gather(1, targets[:, None])[:, 0]
    assert least(TEMPERATURES, cross_entropies(told, own, TEMPERATURES)) == pytest.approx(planted, rel=0.03)
    absent = torch.cat((told, torch.full((len(z), 5), -torch.inf)), 1)  # as a shortlist leaves tokens out
    np.testing.assert_allclose(cross_entropies(absent, own, TEMPERATURES), cross_entropies(told, own, TEMPERATURES))
    less = told.index_fill(1, torch.tensor([0]), -torch.inf)
    gone = cross_entropies(less, less.gather(1, targets[:, None])[:, 0], TEMPERATURES)
    assert np.isfinite(gone).all()


def test_summary_counts_every_row_once():
    rows = table(4)
    (exits,) = fit_exits(rows, "confidence", (0.8,)).values()
    found = summary(rows, profile(exits), "confidence", layers=20)
    assert sum(found["left_after_layer"].values()) == found["rows"] == len(rows) and found["agreement"] > 0.8
    assert found["mean_layers"] == sum(int(k) * v for k, v in found["left_after_layer"].items()) / len(rows) < 20


def test_an_entropy_limit_near_the_vocabularys_logarithm_is_idle():
    """The published thresholds at T = 2 and 128,256 tokens, whose largest entropy is 11.76, on logits with a deviation
    of 3: the entropy is about 10.6, and limits of 11.1 to 11.4 keep no row."""
    published = Profile.read(PUBLISHED)
    draw, parts = torch.Generator().manual_seed(0), []
    for _ in range(6):
        z = 3 * torch.randn(50, 128_256, generator=draw) - 7.5  # so that the logit's and margin's limits do decide
        parts.append(torch.stack(scores(z, published.gate_temperature), 0).double())
    first, lead, spread = (part.numpy() for part in torch.cat(parts, 1))
    layers = tuple(exit.layer for exit in published.exits)
    flags = np.ones((len(first), len(layers)), dtype=bool)
    columns = {f"{n}_RE": np.repeat(v[:, None], len(layers), 1) for n, v in zip(TESTS, (first, lead, spread))}
    rows = Table(
        layers=layers,
        temperature=2.0,
        questions=1,
        question_R=np.zeros(len(first), dtype=np.int64),
        probe_RE=flags * np.nan,
        agrees_RE=flags,
        answers_RE=flags,
        **columns,
    )
    found = gates(rows, published, "confidence")
    assert found and all("entropy" in gate["idle"] for gate in found)
    assert all(gate["kept_alone"]["margin"] > 0 for gate in found[:3]) and "logit" not in found[0]["idle"]
    assert show_gates("t", found).count(" idle") >= len(found)
    tight = replace(published, exits=(replace(published.exits[0], entropy=float(np.median(spread)), logit=-99.0),))
    assert gates(rows, tight, "confidence")[0]["idle"] == ["logit"]


@EXAMPLES
@given(st.lists(st.floats(allow_nan=False, width=64), min_size=4, max_size=4), st.floats(0, 1))
def test_a_written_profile_reads_as_it_was(tmp_path_factory, numbers, probe):
    folder = tmp_path_factory.mktemp("p")
    exits = (Exit(layer=3, logit=numbers[0], margin=numbers[1], entropy=numbers[2]), Exit(layer=5, probe=probe))
    made = Profile(name='a "b"', exits=exits, gate_temperature=1.13, model_hash="m", head_hash="h")
    path = folder / "p.toml"
    path.write_text(profile_text(made, ["made by", "x"]))
    assert Profile.read(path) == made
    assert Profile.read(path).hash == made.hash != replace(made, gate_temperature=1.0).hash


def test_a_profile_is_written_under_its_name(tmp_path):
    path = write_profile(tmp_path / "profiles", profile((Exit(layer=1, probe=0.5),)), ["anydepth calibrate"])
    assert path == tmp_path / "profiles" / "p.toml" and path.read_text().startswith("# anydepth calibrate\n")
    assert tomllib.loads(path.read_text())["exit"] == [{"layer": 1, "probe": 0.5}]


def test_levels_have_a_default_that_falls():
    assert list(fit_exits(table(5), "probe")) == sorted(LEVELS, reverse=True)
