"""What `anydepth rollout` prints. Imports no torch."""

from __future__ import annotations

from anydepth.record import Record


def print_rollout(record: Record) -> None:
    found = record.aggregates
    depth = "" if found["mean_depth"] is None else f", mean depth {found['mean_depth']:.2f}"
    ends = ", ".join(f"{count} {reason}" for reason, count in found["finish_reasons"].items())
    print(f"{found['n']} answers to {found['prompts']} prompts in {record.path}: {ends}")
    print(f"{found['output_tokens']} tokens{depth}, {found['segments_executed']} segments executed in decoding")
