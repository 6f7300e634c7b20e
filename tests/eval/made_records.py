"""Hand-made eval Records: every answer says what it is worth and how it was made."""

from __future__ import annotations

from anydepth.eval.aggregate import aggregate
from anydepth.record import RecordWriter

PROVENANCE = {
    "anydepth": {"version": "0.1.0", "commit": "c0ffee" * 6, "dirty": False},
    "python": "3.11.7",
    "packages": {"torch": "2.9.0"},
    "os": "Linux",
    "cpu": "a machine",
    "threads": 1,
    "gpu": [],
    "model": {"name": "looped", "hash": "ab" * 32},
    "tokenizer": {"hash": "cd" * 32},
    "task": {"name": "sums", "hash": "ef" * 32},
    "seed": 0,
}
SETTINGS = {
    "task": "sums",
    "model": "looped",
    "backend": "engine",
    "question_ids_sha256": "12" * 32,
    "concurrency": 8,
    "max_tokens": 64,
    "temperature": 0.0,
    "top_k": None,
    "top_p": 1.0,
    "seed": 0,
    "n": 1,
    "stop": [],
    "stop_token_ids": [1],
    "ignore_eos": False,
    "logprobs": None,
    "first_token": "prefill",
    "fill": "last_exited",
    "dtype": "float32",
    "gate_dtype": "float32",
    "device": "cpu",
    "segments": 4,
    "policy": "never",
    "exit_threshold": 1.0,
    "min_depth": 1,
    "max_depth": 4,
    "depth": None,
    "trace": None,
}
GATE = {"policy": "gate_cdf", "exit_threshold": 0.5}


def answer(id, score=1.0, *, ids=(7, 8, 1), depths=None, index=0, executed=None, **more):
    """One line of samples.jsonl. depths: of all output tokens, the first at full depth where they are left out."""
    ids = list(ids)
    depths = [4] * len(ids) if depths is None else list(depths)
    read = sum(depths[1:])
    return {
        "id": str(id),
        "answer_index": index,
        "group": None,
        "prompt_ids_sha256": f"prompt of {id}",
        "output_ids": ids,
        "depths": depths,
        "decode_tokens": len(ids) - 1,
        "segments_read": read,
        "segments_executed": read if executed is None else executed,
        "finish_reason": "stop",
        "text": f"it is {score}",
        "prediction": {"strict": str(score)},
        "score": score,
        "scores": {},
        "unscored": "nobody knows" if score is None else None,
        "levels": None,
        "seed": 0,
        "latency_s": 0.1,
        **more,
    }


def write_arm(
    folder,
    answers,
    *,
    name=None,
    protocol="p" * 64,
    finish=True,
    provenance=None,
    metrics=None,
    questions=None,
    **settings,
):
    """A Record in `folder`, complete or, without `finish`, left as it is."""
    name = name or folder.name
    questions = questions or len({answer["id"] for answer in answers})
    with RecordWriter(
        folder,
        kind="eval",
        settings_used={**SETTINGS, "name": name, "questions": questions, **settings},
        settings_passed={"name": name},
        provenance={**PROVENANCE, **(provenance or {})},
        protocol_hash=protocol,
    ) as writer:
        for each in answers:
            writer.append(each)
        if not finish:
            return writer.record
        return writer.finish({**aggregate(writer.samples), "metrics": metrics or {}})
