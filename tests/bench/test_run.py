"""`run_bench` from end to end on a random model: what is written, what is counted, and what an interruption leaves."""

from __future__ import annotations

import json

import pytest

from anydepth import LLM, Sampling
from anydepth.bench.aggregate import aggregate
from anydepth.bench.arrivals import fit
from anydepth.bench.run import JOURNAL, run_bench
from anydepth.bench.table import print_tables
from anydepth.bench.throughput import Cell
from anydepth.record import HEADER, SAMPLES, Record, RecordWriter
from tests.bench.stub import wobbly
from tests.bench.test_arrivals import evenly
from tests.random_nano import write_random_nano

CELLS = [
    Cell("never", Sampling(max_tokens=6)),
    Cell("one", Sampling(depth=1)),
    Cell("gate", Sampling(exit_threshold=0.6), "full"),
]
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
TIMES = ("_s", "seconds", "_per_s", "memory_bytes", "_p50", "_p95", "_p99", "most_waiting", "kept_up")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(write_random_nano(tmp_path_factory.mktemp("random"), loops=2))


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    return fit(evenly(tmp_path_factory.mktemp("trace"), n=6, every_s=0.001), max_positions=160)


def bench(llm, out, **options):
    given = {"cells": CELLS, "prompts": PROMPTS, "concurrency": (1, 3), "requests": 5, "max_batch": 2}
    return run_bench(llm.checkpoint, out=out, **given | options)


@pytest.fixture(scope="module")
def made(llm, load, tmp_path_factory):
    calls = []
    out = tmp_path_factory.mktemp("bench") / "out"
    record = bench(llm, out, arrivals=load, progress=lambda done, total: calls.append((done, total)))
    return record, calls


def untimed(sample):
    return {k: v for k, v in sample.items() if not k.endswith(TIMES) and k not in ("place", "bound_s")}


def test_one_sample_a_block_cell_and_repetition(made):
    record, calls = made
    assert record.kind == "bench" and record.status == "complete" and calls == [(i, 27) for i in range(1, 28)]
    assert [(s["id"], s["answer_index"]) for s in record.samples] == [
        (f"{block}/{cell.name}", repetition)
        for block in ("closed-1", "closed-3", "arrivals")
        for cell in CELLS
        for repetition in range(3)
    ]
    places = {}
    for sample in record.samples:
        places.setdefault(sample["block"], []).append(sample["place"])
    assert all(sorted(order) == list(range(9)) != order for order in places.values())
    assert len({tuple(order) for order in places.values()}) == 3
    assert not (record.path / JOURNAL).exists()


def test_settings_say_what_was_run(made, llm):
    settings = made[0].settings_used
    assert settings["cells"] == [
        {"name": "never", "fill": "last_exited", "policy": "never", "max_tokens": 6},
        {"name": "one", "fill": "last_exited", "policy": "fixed", "depth": 1},
        {"name": "gate", "fill": "full", "policy": "gate_cdf", "exit_threshold": 0.6},
    ]
    assert settings["requests"] == [5, 5] and settings["threads"] == 1 and settings["arrivals"]["requests"] == 6
    own = llm.generate(PROMPTS, Sampling(max_tokens=6))
    assert settings["lengths"] == [len(output.token_ids) for output in own]
    assert made[0].provenance["model"]["hash"] == llm.checkpoint.model_hash


def test_aggregates_are_a_pure_function_of_the_samples(made):
    record = Record.read(made[0].path)
    assert aggregate(record.samples) == record.aggregates == made[0].aggregates


def test_rows_have_the_figures_and_their_ranges(made):
    rows = made[0].aggregates["rows"]
    assert [(row["concurrency"], row["name"]) for row in rows] == [(c, cell.name) for c in (1, 3) for cell in CELLS]
    for row in rows:
        for name in ("tokens_per_s", "questions_per_s", "first_token_s_p50", "inter_token_s_p99", "peak_memory_bytes"):
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
        assert row["questions_per_s"] / row["tokens_per_s"] == pytest.approx(5 / row["tokens"])
        assert {"s", "s_max", "share_of_bound", "share_of_gain", "time_saved_share", "roofline_share"} <= row.keys()
        assert row["repetitions_differ"]["requests"] == 10 and row["repetitions_differ"]["differ"] == 0
        assert row["repeats_differ"]["requests"] == 6 and row["repeats_differ"]["differ"] == 0  # 2 of 5, three times
    assert [row["s"] for row in rows if row["name"] == "never"] == [1.0, 1.0]
    assert [row["mean_depth"] for row in rows[:2]] == [2.0, 1.0] and rows[1]["s_max_flops"] > 1
    assert [(row["name"], row["concurrency"], row["requests"]) for row in made[0].aggregates["batch_variance"]] == [
        (cell.name, [1, 3], 15) for cell in CELLS
    ]


def test_arrivals_have_rows_of_their_own(made):
    rows = made[0].aggregates["arrivals"]
    assert [row["name"] for row in rows] == ["never", "one", "gate"]
    for row in rows:
        assert row["tokens"] == 24 and row["end_to_end_s_p50"] >= row["first_token_s_p50"] > 0
        assert row["offered_requests_per_s"] == pytest.approx(1000) and row["repetitions_differ"]["requests"] == 12


def changed(sample):
    return {int(request): ids for request, (ids, _) in sample["changed"].items()}


def test_divergences_between_repetitions_are_found_where_they_are(llm, tmp_path, monkeypatch):
    """The cell `one` answers its request 2 otherwise in every engine but the first it gets, at output 1."""
    seen = []

    def where(engine, request):
        if engine.cell.depth != 1 or request != 2:  # the warm-up has two
            return None
        seen.append(engine)
        return 1 if engine is not seen[0] else None

    wobbly(monkeypatch, where)
    record = bench(llm, tmp_path, concurrency=(2,), lengths=[4, 4, 4])
    never, one, gate = record.aggregates["rows"]
    first = min((s for s in record.samples if s["cell"] == "one"), key=lambda s: s["place"])["answer_index"]
    expected = [[1, 2, 1], [2, 2, 1]] if first == 0 else [[first, 2, 1]]
    assert one["repetitions_differ"]["where"] == expected and one["repetitions_differ"]["first_position"] == 1
    assert one["repetitions_differ"]["differ_in_tokens"] == len(expected)
    assert one["repetitions_differ"]["differ_in_depths"] == 0
    assert never["repetitions_differ"]["differ"] == gate["repetitions_differ"]["differ"] == 0


def test_batch_variance_is_counted_by_pair_of_concurrencies(llm, tmp_path, monkeypatch):
    """At 3 in flight requests 0 and 4 end otherwise, every time: no divergence of repetitions, all of the batch."""
    wobbly(monkeypatch, lambda engine, request: 3 if engine.max_batch == 3 and request in (0, 4) else None)
    record = bench(llm, tmp_path, concurrency=(1, 2, 3), lengths=[4, 4, 4])
    assert all(row["repetitions_differ"]["differ"] == 0 for row in record.aggregates["rows"])
    pairs = [(row["name"], *row["concurrency"]) for row in record.aggregates["batch_variance"]]
    assert pairs == [(cell.name, *both) for both in ((1, 2), (1, 3), (2, 3)) for cell in CELLS]
    for row in record.aggregates["batch_variance"]:
        assert row["requests"] == 15 and row["differ"] == (6 if 3 in row["concurrency"] else 0)
        assert row["first_position"] == (3 if 3 in row["concurrency"] else None)


def test_repeats_of_a_prompt_are_compared_with_its_first(llm, tmp_path, monkeypatch):
    """Requests 3 and 4 have the prompts of 0 and 1; 4 is answered otherwise at the first output."""
    wobbly(monkeypatch, lambda engine, request: 0 if request == 4 else None)
    record = bench(llm, tmp_path, concurrency=(2,), lengths=[4, 4, 4])
    for row in record.aggregates["rows"]:
        assert row["repeats_differ"]["where"] == [[0, 4, 0], [1, 4, 0], [2, 4, 0]]
        assert row["repeats_differ"]["requests"] == 6 and row["repetitions_differ"]["differ"] == 0


def test_an_interrupted_bench_goes_on_with_the_next_block(llm, load, made, tmp_path, monkeypatch):
    def stop(done, total):
        if done == 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(llm, tmp_path, arrivals=load, progress=stop)
    kept = (tmp_path / SAMPLES).read_bytes()
    assert kept.count(b"\n") == 9 and Record.read(tmp_path).status == "running"
    engines, calls = wobbly(monkeypatch), []
    monkeypatch.setattr("anydepth.bench.run.natural_lengths", lambda plan: pytest.fail("found before"))
    record = bench(llm, tmp_path, arrivals=load, progress=lambda done, total: calls.append(done))
    assert calls == list(range(9, 28)) and {engine.max_batch for engine in engines} == {3, 2}
    assert (tmp_path / SAMPLES).read_bytes().startswith(kept)
    assert list(map(untimed, record.samples)) == list(map(untimed, made[0].samples))


def test_a_kill_while_a_block_is_written_loses_and_repeats_nothing(llm, tmp_path, monkeypatch):
    append = RecordWriter.append

    def killed(self, sample):
        if sample["block"] == "closed-3" and len(self.samples) == 13:
            raise KeyboardInterrupt
        append(self, sample)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RecordWriter, "append", killed)
        bench(llm, tmp_path)
    measured = json.loads((tmp_path / JOURNAL).read_bytes())
    with (tmp_path / SAMPLES).open("ab") as file:
        file.write(b'{"id": "closed-3/one", "answ')  # half a line
    engines = wobbly(monkeypatch)
    record = bench(llm, tmp_path)
    assert not engines and not (tmp_path / JOURNAL).exists()
    assert list(record.samples[9:]) == measured and len(record.samples) == 18


def test_a_complete_one_is_returned_and_another_is_refused(llm, made, load, monkeypatch):
    engines = wobbly(monkeypatch)
    again = bench(llm, made[0].path, arrivals=load)
    assert again.aggregates == made[0].aggregates and not engines
    with pytest.raises(ValueError, match=r"holds a run of something else .*repetitions is 3 there and 4 here"):
        bench(llm, made[0].path, arrivals=load, repetitions=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cells": CELLS[1:]}, "the first cell is one; .*put a cell first whose policy is never"),
        ({"cells": []}, "the first cell is missing"),
        ({"cells": [CELLS[0], CELLS[0]]}, "never, never; give each a name of its own"),
        ({"cells": [CELLS[0], Cell("deep", Sampling(depth=9))]}, "cell 'deep': .*9"),
        ({"cells": [CELLS[0], Cell("odd", Sampling(), "sharde")]}, "unknown fill 'sharde'"),
        (
            {"cells": [CELLS[0], Cell("late", Sampling(), "shared", "exact")]},
            "cell 'late': signals 'exact' does not go",
        ),
        ({"cells": [CELLS[0], Cell("late", Sampling(), None, "exact", 9)]}, "cell 'late': lateness is 9"),
        ({"prompts": []}, "no prompts"),
        ({"prompts": [[1], [10**6]], "lengths": [1, 1]}, "cell 'never': the prompt has 1000000"),
        ({"lengths": [1]}, "1 lengths for 3 prompts"),
        ({"concurrency": (0,)}, r"concurrency is \[0\]"),
        ({"concurrency": (2, 2)}, r"concurrency is \[2, 2\]"),
        ({"concurrency": ()}, "nothing to run"),
        ({"requests": 0}, "requests is 0"),
        ({"repetitions": 2}, "repetitions is 2; allowed: whole numbers from 3"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(options, message, llm, tmp_path):
    with pytest.raises(ValueError, match=message):
        bench(llm, tmp_path / "out", **options)
    assert not (tmp_path / "out" / HEADER).exists()


def test_modes_of_signals_do_the_same_work_and_count_what_they_ran(llm, load, tmp_path):
    gate = Sampling(exit_threshold=0.3)
    late = [Cell(mode, gate, None, mode, 2) for mode in ("delayed", "exact", "resident")]
    record = bench(llm, tmp_path, cells=[CELLS[0], Cell("sync", gate), *late], arrivals=load)
    cells = {cell["name"]: cell for cell in record.settings_used["cells"]}
    assert "signals" not in cells["sync"] and cells["exact"]["signals"] == "exact" and cells["exact"]["lateness"] == 2
    found = {(s["block"], s["cell"]): s for s in record.samples if s["answer_index"] == 0}
    for block in ("closed-1", "closed-3", "arrivals"):
        sync, delayed, exact, resident = (found[block, name] for name in ("sync", "delayed", "exact", "resident"))
        assert sync["answers"] == exact["answers"] == resident["answers"]
        assert sync["tokens"] == delayed["tokens"] == exact["tokens"] == resident["tokens"]
        assert sync["segments_executed"] == resident["segments_executed"] < exact["segments_executed"]
    sync, exact, resident = (found["closed-3", name] for name in ("sync", "exact", "resident"))
    assert sync["flops"] < exact["flops"] and sync["flops"] < resident["flops"]  # here a readout a row a turn


def test_arrivals_alone(llm, load, tmp_path):
    record = bench(llm, tmp_path, concurrency=(), arrivals=load)
    assert record.aggregates["rows"] == [] and len(record.aggregates["arrivals"]) == 3 and len(record.samples) == 9


def test_requests_take_the_prompts_in_turn_and_grow_with_concurrency(llm, tmp_path):
    record = bench(llm, tmp_path, cells=CELLS[:1], concurrency=(1, 8), requests=None, lengths=[2, 2, 2])
    assert record.settings_used["requests"] == [16, 32]
    assert record.samples[0]["prompts"] == [0, 1, 2] * 5 + [0] and record.samples[0]["tokens"] == 32


def test_tables_show_every_cell(made, capsys):
    print_tables(made[0])
    shown = capsys.readouterr().out
    assert shown.count("never") >= 6 and "0/10" in shown and "0/15" in shown and "0/12" in shown
    assert "open loop: 6 arrivals of trace.jsonl" in shown and "0 of 6 arrivals were shortened" in shown
