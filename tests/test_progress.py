"""Bars: one look, on stderr only."""

from __future__ import annotations

import pytest

from anydepth.progress import Countdown, bars


def test_a_bar_is_on_stderr_with_its_name_and_counts(capsys):
    with bars("answers [of all]", total=3) as (answers,):
        for _ in range(2):
            answers.advance()
        answers.advance(0.5)
    out, err = capsys.readouterr()
    assert not out and "answers [of all]" in err and "2/3" in err and " left " in err


def test_waiting_bars_begin_in_turn_with_their_own_totals(capsys):
    with bars("first", "second", "third", total=9, waiting=True) as (first, second, _):
        first.begin(4)
        first.advance(4)
        second.begin(5)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["first", "second", "third"]
    assert "4/4" in lines[0] and "0/5" in lines[1] and "0/9" in lines[2]
    assert "-:--:--" not in lines[0] and lines[2].count("-:--:--") == 2  # its clock does not run yet


def test_a_bar_may_learn_its_total_and_say_what_is_under_way(capsys):
    with bars("runs") as (runs,):
        runs.reached(2, 7)
        runs.tell("the last ones")
    err = capsys.readouterr().err
    assert "the last ones" in err and "2/7" in err and "runs" not in err


def test_bars_that_are_not_shown_can_be_moved_on(capsys):
    with pytest.raises(KeyError), bars("answers", total=3, shown=False) as (answers,):
        answers.begin(2)
        answers.advance()
        raise KeyError
    assert capsys.readouterr() == ("", "")


def test_a_countdown_says_a_line_in_so_many_and_a_last_one(monkeypatch):
    clock, told = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    countdown = Countdown("made", 25, "answers", told.append, every=10, before=5)
    for count in (1, 3, 2, 9, 4, 1):  # 6, 9, 11, 20, 24, 25: what there was before took no time
        clock[0] += 30.0 * count
        countdown.advance(count)
    assert told == [
        "made 11 of 25 answers, 0:07:00 to go",
        "made 20 of 25 answers, 0:02:30 to go",
        "made 25 of 25 answers, 0:00:00 to go",
    ]
