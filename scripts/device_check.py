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
TESTS_S = 240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    report: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    steps: dict[str, Callable[[], Any]] = {
        "device": lambda: device_facts(options.device),
        "equality": lambda: equality(options.device),
        "speed": lambda: speed(options.device),
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

    config = OURO_1_4B | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 97,
    }
    asks = [
        Sampling(max_tokens=24),
        Sampling(max_tokens=24, depth=2),
        Sampling(max_tokens=24, exit_threshold=0.6),
        Sampling(max_tokens=24, exit_threshold=0.4, temperature=1.0, top_p=0.9, seed=7),
    ]
    checked = differ = 0
    for fill in ("full", "last_exited", "shared"):
        answers = []
        for place in ("cpu", device):
            model = random_model(config, place, torch.float64)
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
