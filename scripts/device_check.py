"""The part of device_check.sh that needs Python: run the tests, then time decoding on CUDA at Ouro-1.4B's shape.

Weights are random (a speed does not depend on them) and made on the device. Everything ends in one JSON; a step that
fails is written down with its error and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

OURO_1_4B = {
    "model_type": "ouro",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "total_ut_steps": 4,
}
SMALL = OURO_1_4B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
}
TESTS_S = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    report: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    steps: dict[str, Callable[[], Any]] = {
        "device": lambda: device_facts(options.device),
        "equality": lambda: equality(options.device),
        "late signals": lambda: late_equality(options.device),
        "speed": lambda: speed(options.device),
        "resident": lambda: resident_speed(options.device),
        "tests": run_tests,
    }
    for name, step in steps.items():
        start = time.perf_counter()
        try:
            report[name] = step()
        except Exception:
            report[name] = {"error": traceback.format_exc(limit=4)}
        report[f"{name}_s"] = round(time.perf_counter() - start, 1)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        print(name, json.dumps(report[name])[:2000], flush=True)


def device_facts(device: str) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {"name": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}


def run_tests() -> dict[str, Any]:
    """The test suite on the CPU of this machine, as far as its packages allow."""
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "--maxfail=20", "-p", "no:cacheprovider"],
            capture_output=True,
            text=True,
            timeout=TESTS_S,
        )
    except subprocess.TimeoutExpired as error:
        return {"timed_out_s": TESTS_S, "tail": str(error.stdout or "")[-1000:]}
    return {"exit_code": run.returncode, "tail": run.stdout[-1500:] + run.stderr[-500:]}


def equality(device: str) -> dict[str, Any]:
    """Tokens and depths of a small float64 model on the GPU against the same on the CPU, every fill and policy."""
    from anydepth.engine.engine import Engine
    from anydepth.types import Sampling

    asks = [
        Sampling(max_tokens=24),
        Sampling(max_tokens=24, depth=2),
        Sampling(max_tokens=24, exit_threshold=0.6),
        Sampling(max_tokens=24, interval=4, shallow_depth=1),
        Sampling(max_tokens=24, exit_threshold=0.4, temperature=1.0, top_p=0.9, seed=7),
    ]
    checked = differ = 0
    for fill in ("full", "last_exited", "deferred", "shared"):
        answers = []
        for place in ("cpu", device):
            model = random_model(SMALL, place, torch.float64)
            engine = Engine(model, fill=fill, max_batch=3, page_size=4)
            requests = [engine.submit([3 + i] * (4 + 5 * i), ask) for i, ask in enumerate(asks)]
            outputs = {}
            while not engine.idle:
                for chunk in engine.step():
                    if chunk.output:
                        outputs[chunk.request_id] = (chunk.output.token_ids, chunk.output.depths)
            answers.append([outputs[request.id] for request in requests])
        checked += len(asks)
        differ += sum(a != b for a, b in zip(*answers, strict=True))
    return {"requests": checked, "differ": differ}


def ways(device: str) -> list[dict[str, Any]]:
    """Every signal mode, each with more and more of what a CUDA device allows."""
    from anydepth.engine.submission import Submission

    cuda = device.startswith("cuda")
    plain = [{"signals": mode, "lateness": late} for mode in ("exact", "resident") for late in (1, 2)]
    more = [{"signals": "exact", "submission": Submission(streams=2)}] if cuda else []
    more += [{"signals": "resident", "submission": Submission(streams=2)}] if cuda else []
    more += [{"signals": "resident", "submission": Submission(padding=True)}]
    more += [{"signals": "resident", "submission": Submission(padding=True, graphs=True)}] if cuda else []
    return plain + more


def late_equality(device: str) -> dict[str, Any]:
    """Tokens and depths of a small float64 model in every signal mode against `sync` on the same device, in a pool too
    small for all."""
    from anydepth.engine.engine import Engine
    from anydepth.types import Sampling

    model = random_model(SMALL, device, torch.float64)
    asks = [
        Sampling(max_tokens=24, exit_threshold=(0.3, 0.6, 0.9)[n % 3], temperature=n % 2, top_p=0.9, seed=n)
        for n in range(9)
    ]

    def answers(**options: Any) -> list[Any]:
        engine = Engine(model, max_batch=6, page_size=4, kv_pages=40, **options)
        requests = [engine.submit([3 + n] * (4 + 3 * n), ask) for n, ask in enumerate(asks)]
        outputs = {chunk.request_id: chunk.output for chunk in run_all(engine) if chunk.output}
        return [(outputs[request.id].token_ids, outputs[request.id].depths) for request in requests]

    wanted, found = answers(), {}
    for options in ways(device):
        differ = sum(a != b for a, b in zip(answers(**options), wanted, strict=True))
        found[str(options)] = {"requests": len(asks), "differ": differ}
    return found


def resident_speed(device: str) -> list[dict[str, Any]]:
    """Decoding at Ouro-1.4B's shape in bfloat16: `sync` against `resident`, eager and with graphs, at C = 1, 8, 32;
    tokens/s beside what memory bandwidth allows (weights and K/V read once a turn)."""
    from anydepth.engine.engine import Engine
    from anydepth.engine.submission import Submission
    from anydepth.types import Sampling

    model = random_model(OURO_1_4B, device, torch.bfloat16)
    bandwidth = measured_bandwidth(device)
    cuda = device.startswith("cuda")
    cells: dict[str, dict[str, Any]] = {
        "sync, eager": {},
        "exact": {"signals": "exact"},
        "resident, eager": {"signals": "resident", "submission": Submission()},
    }
    if cuda:
        cells["resident, graphs"] = {"signals": "resident"}
    rows = []
    for concurrency in (1, 8, 32):
        prompts = [[(7 * i + j) % 49152 for j in range(60)] for i in range(concurrency)]
        for name, options in cells.items():
            engine = Engine(model, max_batch=concurrency, prefix_sharing=False, **options)
            engine.work = []
            times = []
            for _ in range(4):  # the first warms up, and captures
                for prompt in prompts:
                    engine.submit(prompt, Sampling(max_tokens=64, exit_threshold=0.7, ignore_eos=True))
                while any(s.prefilling for s in engine.scheduler.running.values()) or engine.scheduler.waiting:
                    engine.step()
                settle(device)
                engine.work.clear()
                start = time.perf_counter()
                tokens = sum(chunk.token_id is not None for chunk in run_all(engine))
                settle(device)
                times.append((time.perf_counter() - start, tokens, bytes_read(model, engine.work)))
            seconds, tokens, read = sorted(times[1:])[1]
            rows.append(
                {
                    "concurrency": concurrency,
                    "cell": name,
                    "tokens_per_s": tokens / seconds,
                    "bound_tokens_per_s": tokens / (read / bandwidth),
                    "range_s": [min(t for t, *_ in times[1:]), max(t for t, *_ in times[1:])],
                    "bandwidth_GB_per_s": bandwidth / 1e9,
                    "graphs_replayed": getattr(getattr(engine.runner, "graphs", None), "replayed", 0),
                }
            )
            del engine
    return rows


def bytes_read(model: Any, work: Any) -> float:
    """Bytes that the turns must read: weights once a turn, K/V per position, and the head where something was read."""
    segment, readout = model.cost("segment", 1, 0.0), model.cost("readout", 1, 0.0)
    per_position = model.cost("segment", 1, 1.0).bytes_per_row - segment.bytes_per_row
    total = 0.0
    for turn in work:
        total += segment.weight_bytes_per_turn + turn.kv_read * per_position
        total += readout.weight_bytes_per_turn if turn.readout_rows else 0.0
    return total


def measured_bandwidth(device: str) -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.empty(1 << (28 if device.startswith("cuda") else 24), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        settle(device)
        start = time.perf_counter()
        target.copy_(source)
        settle(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


def settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def run_all(engine: Any) -> Any:
    """Every chunk until the engine is idle."""
    while not engine.idle:
        yield from engine.step()


def speed(device: str) -> list[dict[str, Any]]:
    """Tokens/s at Ouro-1.4B's shape in bfloat16, beside the bound, for fixed depths at C = 1, 8, 32."""
    from anydepth.bench.throughput import Cell, matched_work
    from anydepth.types import Sampling

    model = random_model(OURO_1_4B, device, torch.bfloat16)
    cells = [Cell("never", Sampling()), *(Cell(f"depth {d}", Sampling(depth=d)) for d in (1, 2, 3))]
    rows = []
    for concurrency in (1, 8, 32):
        prompts = [[(7 * i + j) % 49152 for j in range(60)] for i in range(concurrency)]
        timed = matched_work(model, cells, prompts, [48] * concurrency, concurrency=concurrency, repetitions=3)
        rows += [{"concurrency": concurrency} | cell.asdict() for cell in timed]
    return rows


def random_model(config: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    """An Ouro with seeded random weights, the same numbers on every device where the model is small."""
    from anydepth.models.ouro import Ouro

    place = torch.device(device)
    model = Ouro(config, dtype=dtype, device=place)
    small = config["hidden_size"] < 512
    generator = torch.Generator(device="cpu" if small else place).manual_seed(0)
    for name, slot in model.slots().items():
        numbers = torch.randn(slot.shape, generator=generator, device=generator.device)
        slot.copy_(1 + 0.1 * numbers if "norm" in name else numbers * slot.shape[-1] ** -0.5)
    return model


if __name__ == "__main__":
    main()
