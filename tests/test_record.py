"""Records: what is written is read again, and a kill loses only what was under way."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from anydepth import record as r
from anydepth.record import Record, RecordWriter

SETTINGS = {"policy": "gate_cdf", "exit_threshold": 0.5, "stop": ("\n",)}


def writer(folder, **changes):
    return RecordWriter(
        folder,
        **{
            "kind": "eval",
            "settings_used": SETTINGS,
            "settings_passed": {"exit_threshold": 0.5},
            "provenance": {"packages": {"torch": "2"}, "seed": 0},
        }
        | changes,
    )


def sample(number, **more):
    return {"id": f"q{number}", "answer_index": 0, "text": "é\u2028\n☂", "depths": (4, 1), **more}


def written(folder, *, n=3):
    with writer(folder) as out:
        for number in range(n):
            out.append(sample(number))
        return out.finish({"n": n})


def test_round_trip(tmp_path):
    finished = written(tmp_path)
    read = Record.read(tmp_path)
    assert read == finished
    assert read.status == "complete" and read.aggregates == {"n": 3}
    assert read.settings_used["stop"] == ["\n"] and read.settings_passed == {"exit_threshold": 0.5}
    assert [s["id"] for s in read.samples] == ["q0", "q1", "q2"] and read.samples[0]["text"] == sample(0)["text"]
    assert read.samples_sha256 == hashlib.sha256((tmp_path / "samples.jsonl").read_bytes()).hexdigest()
    assert read.provenance["started"] <= read.provenance["finished"]
    assert not list(tmp_path.glob("*.partial"))


def test_each_sample_is_in_the_file_at_once(tmp_path):
    with writer(tmp_path) as out:
        for number in range(3):
            out.append(sample(number))
            assert len(Record.read(tmp_path).samples) == number + 1


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_half_written_last_line_is_dropped_and_its_question_asked_again(tmp_path, cut):
    with writer(tmp_path) as out:
        out.append(sample(0))
        out.append(sample(1))
    lines = (tmp_path / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_bytes(lines[0] + lines[1][:cut])
    assert [s["id"] for s in Record.read(tmp_path).samples] == ["q0"]

    with writer(tmp_path) as out:
        assert out.done == {("q0", 0)}
        out.append(sample(1))
        out.append(sample(2))
        out.finish({})
    assert [s["id"] for s in Record.read(tmp_path).samples] == ["q0", "q1", "q2"]
    assert (tmp_path / "samples.jsonl").read_bytes().startswith(b"".join(lines))


def test_no_answer_twice(tmp_path):
    with writer(tmp_path) as out:
        out.append(sample(0))
        out.append(sample(0, answer_index=1))
        with pytest.raises(ValueError, match="already has answer 0 of question 'q0'"):
            out.append(sample(0))
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(json.dumps(sample(0)).encode() + b"\n")
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 3 repeats answer 0 of question 'q0'"):
        Record.read(tmp_path)


@pytest.mark.parametrize(("line", "message"), [(b"{]", "line 2 is not JSON"), (b'{"id": 3}', "line 2 needs an id")])
def test_a_damaged_line_is_named(tmp_path, line, message):
    with writer(tmp_path) as out:
        out.append(sample(0))
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match=message):
        Record.read(tmp_path)


def test_changed_samples_are_noticed(tmp_path):
    written(tmp_path)
    content = (tmp_path / "samples.jsonl").read_bytes()
    (tmp_path / "samples.jsonl").write_bytes(content.replace(b"q1", b"q9"))
    with pytest.raises(ValueError, match="sha256"):
        Record.read(tmp_path)
    (tmp_path / "samples.jsonl").unlink()
    with pytest.raises(ValueError, match="no samples"):
        Record.read(tmp_path)
    assert Record.read(tmp_path, samples=False).aggregates == {"n": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version 2; this anydepth reads 1"),
        ({"extra": 0}, "extra"),
        (None, "no record.json"),
    ],
)
def test_a_header_of_another_kind_is_refused(tmp_path, change, message):
    written(tmp_path)
    path = tmp_path / "record.json"
    header = json.loads(path.read_bytes())
    path.unlink() if change is None else path.write_text(json.dumps(header | change))
    with pytest.raises(ValueError, match=message):
        Record.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings_used": SETTINGS | {"exit_threshold": 0.9}}, "exit_threshold is 0.5 there and 0.9 here"),
        ({"provenance": {"packages": {"torch": "3"}, "seed": 0}}, "provenance packages"),
        ({"kind": "bench"}, "kind is 'eval' there and 'bench' here"),
    ],
)
def test_goes_on_with_the_same_run_only(tmp_path, changes, message):
    with writer(tmp_path) as out:
        out.append(sample(0))
    with pytest.raises(ValueError, match=message):
        writer(tmp_path, **changes)
    assert writer(tmp_path, provenance={"packages": {"torch": "2"}, "seed": 0, "cpu": "another"}).done == {("q0", 0)}


def test_a_complete_record_is_left_as_it_is(tmp_path):
    finished = written(tmp_path)
    before = (tmp_path / "record.json").read_bytes()
    with writer(tmp_path) as out:
        with pytest.raises(ValueError, match="complete"):
            out.append(sample(7))
        assert out.finish({"n": 99}) == finished
    assert (tmp_path / "record.json").read_bytes() == before


def test_refuses_what_json_cannot_say_and_foreign_folders(tmp_path):
    with writer(tmp_path / "a") as out, pytest.raises(ValueError):
        out.append(sample(0, score=float("nan")))
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"no record\.json"):
        writer(tmp_path)
    with pytest.raises(ValueError, match="allowed: eval, bench"):
        writer(tmp_path / "b", kind="evil")


def test_publish_is_the_same_every_time_and_reads_the_same(tmp_path):
    finished = written(tmp_path / "run")
    first, second = (r.publish(tmp_path / "run", tmp_path / name) for name in ("x", "y"))
    assert (first / "samples.jsonl.gz").read_bytes() == (second / "samples.jsonl.gz").read_bytes()
    assert sorted(path.name for path in first.iterdir()) == ["record.json", "samples.jsonl.gz"]
    assert Record.read(first).samples == finished.samples
    assert r.publish(first, tmp_path / "again").name == "again"
    (first / "samples.jsonl.gz").write_bytes((first / "samples.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged"):
        Record.read(first)


def test_publish_refuses_unfinished_and_large_ones(tmp_path, monkeypatch):
    with writer(tmp_path / "running"):
        pass
    with pytest.raises(ValueError, match="is running"):
        r.publish(tmp_path / "running", tmp_path / "x")
    written(tmp_path / "run")
    monkeypatch.setattr(r, "PUBLISHED_BYTES", 20)
    with pytest.raises(ValueError, match="allowed: 20"):
        r.publish(tmp_path / "run", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    r.publish(tmp_path / "run", tmp_path / "x", samples=False)
    assert Record.read(tmp_path / "x", samples=False).samples_sha256
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="no Record"):
        r.publish(tmp_path / "run", tmp_path / "mine", samples=False)


def test_remove_takes_the_record_and_nothing_else(tmp_path):
    written(tmp_path / "run")
    (tmp_path / "run" / "thesis.txt").write_text("")
    r.remove(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]
    r.remove(tmp_path / "run")  # not a Record any more
    written(tmp_path / "other")
    r.remove(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    with writer(tmp_path) as first:
        first.append(sample(0))
        with pytest.raises(ValueError, match="is being written by another run"):
            writer(tmp_path)
    with writer(tmp_path) as second:
        assert second.done == {("q0", 0)}


def test_a_full_disk_loses_nothing_that_was_written(tmp_path):
    """The kernel's limit on a file's size stands in for the disk."""
    script = f"""
import resource, signal
from anydepth.record import RecordWriter
from tests.test_record import sample, writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
with writer({str(tmp_path / "out")!r}) as out:
    for number in range(50):
        out.append(sample(number))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 1 and "answers before are kept" in done.stderr and "samples.jsonl" in done.stderr
    whole = Record.read(tmp_path / "out").samples
    assert 5 < len(whole) < 50
    with writer(tmp_path / "out") as out:
        assert len(out.done) == len(whole)
        for number in range(len(whole), 50):
            out.append(sample(number))
        assert [s["id"] for s in out.finish({}).samples] == [f"q{number}" for number in range(50)]
