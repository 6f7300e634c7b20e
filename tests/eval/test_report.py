"""The page: depth shows in lightness, and what models write cannot become markup."""

from __future__ import annotations

from anydepth.eval import plot, report

SAMPLE = {"output_ids": [7, 8, 1], "depths": [4, 2, 1], "decode_tokens": 2, "segments_executed": 3, "score": 0.0}


def lightness(colour):
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_deeper_is_darker_at_any_number_of_segments():
    for segments in (2, 4, 8):
        shades = [lightness(report.tint(depth, segments)) for depth in range(1, segments + 1)]
        assert shades == sorted(shades, reverse=True) and len(set(shades)) == segments and min(shades) > 150
    assert report.tint(1, 1) == report.tint(1, 4)


def test_tokens_know_why_their_depth_was_not_chosen():
    answer = report.answer(SAMPLE, label="gate", pieces=lambda ids: [f" {id}" for id in ids], stop_ids=[1])
    assert answer.tokens == ((" 7", 4, "prompt"), (" 8", 2, ""), (" 1", 1, "end"))
    assert answer.right is False and answer.segments == 3


def test_numbers_and_dashes():
    assert report.percent(0.9933) == "99.3" and report.percent(None) == "–" and report.digits(1234.5, 0) == "1,234"


def test_picture_is_a_png_and_the_same_every_time():
    rows = [
        {
            "accuracy": 0.2 * depth,
            "low": 0.1 * depth,
            "high": 0.21 * depth,
            "depth": depth,
            "exit_threshold": None,
            "segments_per_question": 10.0 * depth,
        }
        for depth in (1, 2, 3, 4)
    ]
    rows += [
        {
            "accuracy": 0.5 + t / 4,
            "low": 0.4,
            "high": 0.9,
            "depth": None,
            "exit_threshold": t,
            "segments_per_question": 12 + 20 * t,
        }
        for t in (0.02, 0.5, 0.9, 1.0)
    ]
    png = plot.pareto(rows)
    assert png.startswith(b"\x89PNG") and png == plot.pareto(rows)
