"""Data files: where they are looked for, and errors that name file and line."""

import pytest

from anydepth.eval.data import data_file, read_jsonl


def test_a_file_is_looked_for_in_the_named_folder(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}")
    assert data_file("a.jsonl", folder=tmp_path) == tmp_path / "a.jsonl"
    monkeypatch.setenv("ANYDEPTH_DATA", str(tmp_path))
    assert data_file("a.jsonl") == tmp_path / "a.jsonl"
    with pytest.raises(ValueError, match=r"no b.jsonl in .*set ANYDEPTH_DATA"):
        data_file("b.jsonl")
    monkeypatch.delenv("ANYDEPTH_DATA")
    with pytest.raises(ValueError, match="no data folder is named; set ANYDEPTH_DATA"):
        data_file("a.jsonl")


def test_rows_are_read_with_unicode_line_ends_inside(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "1", "text": "one\u2028two"}\n\n{"id": "2", "text": "x"}\n', encoding="utf-8")
    assert [row["id"] for row in read_jsonl(path, ("id", "text"))] == ["1", "2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "2"', "line 2 is not JSON"),
        ("[1]", "line 2 is a list; allowed: an object with id, answer"),
        ('{"id": "2"}', "line 2 has no answer"),
        ('{"id": "2", "answer": ""}', "line 2 has no answer"),
        ('{"id": "2", "answer": null}', "line 2 has no answer"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"id": "1", "answer": 0}}\n{line}\n')
    with pytest.raises(ValueError, match=rf"a\.jsonl, {message}"):
        read_jsonl(path, ("id", "answer"))
    path.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        read_jsonl(path, ("id",))


def test_encodings(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"id": "1"}\n')
    assert read_jsonl(path, ("id",)) == [{"id": "1"}]
    path.write_bytes('{"id": "é"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.jsonl is no UTF-8 text"):
        read_jsonl(path, ("id",))
