"""What batch-invariant mode rests on, and what it costs.

Bits: at which row counts a product, a row function or an attention gives a row the same bits at every place of the
block and beside any other rows (`holds`), and at which of those counts they are the bits of a block of 32
(`as_32`). Numbers are drawn with all bits of their dtype: in shorter ones a sum can be exact in any order.

Speed: tokens/s with the mode and without, in interleaved pairs, on nano and on the looped model of about 100M random
parameters of `depth_saves_time.py`; every answer runs through all segments and to its full length.

    python benchmarks/batch_invariance.py --out runs/batch_invariance
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from depth_saves_time import LARGE, random_ouro
from torch import Tensor
from torch.nn.functional import silu

from anydepth.bench.rows import write_rows
from anydepth.dtypes import dtype_name
from anydepth.engine.engine import Engine
from anydepth.engine.invariant import Invariant
from anydepth.exits.gate_cdf import Policy
from anydepth.models.decoder import Decoder, rms_norm, rotate
from anydepth.models.load import load_checkpoint
from anydepth.models.nano.questions import questions
from anydepth.ops.attend import attend_rows
from anydepth.ops.invariant import KV_BLOCK
from anydepth.ops.linear import linear, pack
from anydepth.types import Sampling

COUNTS = (1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64, 128)
ONE_NUMBER = 40  # draws where a row gives one number, which shows less
Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="pairs of runs a model and concurrency")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/batch_invariance"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    nano = load_checkpoint("nano")
    large = random_ouro(LARGE, seed=0)
    with torch.inference_mode():
        rows = products("nano", nano.model)
        rows += products("SmolLM2-135M", load_checkpoint("smollm2-135m").model)
        rows += products("looped, 98M random", large)
        rows += row_functions()
        rows += attention()
    large.pack()
    prompts = [nano.tokenizer.encode(question.prompt) for question in questions("test", n=32)]
    rows += speed("nano", nano.model, prompts, 60, options.repetitions)
    draw = random.Random(0)
    prompts = [[draw.randrange(LARGE["vocab_size"]) for _ in range(16)] for _ in range(32)]
    rows += speed("looped, 98M random", large, prompts, 16, options.repetitions)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    settings = vars(options) | {"benchmark": "batch_invariance", "out": None}
    write_rows(options.out, settings=settings, rows=rows, checkpoint=nano)


def measured(
    function: Callable[[Tensor], Tensor], draw: Callable[[int], Tensor], *, draws: int = 2
) -> dict[str, list[int]]:
    """Row counts at which bits hold, and those of them at which they are the bits of 32 rows."""
    holds, as_32 = set(COUNTS), set(COUNTS)
    for _ in range(draws):
        x = draw(max(COUNTS))
        wanted = torch.cat([function(block) for block in x.split(32)])
        for count in COUNTS:
            # Each row at two places, which tells neighbouring places and other neighbours apart.
            for block in x.split(count)[: len(x) // count]:
                y, moved = function(block), function(block.roll(1, 0))
                if not torch.equal(y.roll(1, 0), moved):
                    holds.discard(count)
            whole = [function(block) for block in x.split(count)[: len(x) // count]]
            if not torch.equal(torch.cat(whole), wanted[: sum(map(len, whole))]):
                as_32.discard(count)
    return {"holds": sorted(holds), "as_32": sorted(holds & as_32)}


def normal(dtype: torch.dtype, *size: int) -> Callable[[int], Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return lambda rows: torch.randn(rows, *size, dtype=wide).to(dtype)


def products(name: str, model: Decoder) -> Rows:
    """Every matrix of a layer and the LM head, by each kernel that such a matrix can meet."""
    rows = []
    model.slots()  # unpacks
    layer = model.layers[0]
    for part in ("qkv", "o", "gate_up", "down", "head"):
        stored = model.head if part == "head" else getattr(layer, part)
        for kernel, weight, function in kernels(stored):
            found = measured(lambda x, w=weight, f=function: f(x, w), normal(weight.dtype, stored.shape[0]))
            shape = f"{stored.shape[0]} x {stored.shape[1]}"
            rows.append({"measured": "product", "model": name, "part": part, "shape": shape, "kernel": kernel, **found})
    return rows


def kernels(stored: Tensor) -> Iterator[tuple[str, Tensor, Callable[[Tensor, Tensor], Tensor]]]:
    yield "float32 matmul", stored, torch.matmul
    if (packed := pack(stored)).is_mkldnn:
        yield "float32 oneDNN", stored, linear
        yield "float32 oneDNN, packed", packed, linear
    if stored.shape[1] < 10_000:
        # Weights with all bits of a float64 too.
        yield "float64 matmul", torch.randn_like(stored, dtype=torch.float64), torch.matmul
        yield "bfloat16 matmul", stored.bfloat16(), torch.matmul


def row_functions() -> Rows:
    """Norm, rotary, gated unit, softmax, gate and exit decision at widths that are and are not whole vectors."""
    rows = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for width in (24, 64, 100, 192, 576, 1024, 2816):
            weight, turned = normal(dtype, width)(1)[0], normal(dtype, 2, width)(1)[0]
            functions: dict[str, Callable[[Tensor], Tensor]] = {
                "rms_norm": lambda x, w=weight: rms_norm(x, w, 1e-6),
                "silu(gate) * up": lambda x: silu(torch.cat((x, x), -1).chunk(2, -1)[0]) * x,
                "softmax": lambda x: x.softmax(-1),
                "rotary": lambda x, t=turned: rotate(x.unsqueeze(1), t[0].expand(len(x), 1, -1), t[1]).squeeze(1),
                "gate": lambda x, w=weight: torch.nn.functional.linear(x, w[None]).squeeze(-1),
            }
            for name, function in functions.items():
                found = measured(function, normal(dtype, width), draws=ONE_NUMBER if name == "gate" else 2)
                rows.append({"measured": "row function", "function": name, "width": width, **_dtype(dtype), **found})
        policy = Policy()
        state = policy.start(torch.tensor([policy.parameters(Sampling(exit_threshold=0.5), (1, 4), 4)]).double())

        def decide(signals: Tensor, policy: Policy = policy, state: Tensor = state) -> Tensor:
            depth = torch.ones(len(signals), dtype=torch.int64)
            return policy.decide(state.expand(len(signals), -1), depth, signals)[1][:, 0]

        found = measured(decide, normal(dtype), draws=ONE_NUMBER)
        rows.append({"measured": "row function", "function": "gate_cdf", "width": 1, **_dtype(dtype), **found})
    return rows


def attention() -> Rows:
    """A row alone against the same row among others and in a longer context of padding, in blocks and unpadded."""
    rows = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for heads, groups, size in ((4, 4, 16), (9, 3, 64), (16, 16, 64)):
            tried = among = longer = unpadded = 0
            for length in (1, 13, 59, 64, 65, 130, 500, 513, 1000):
                q, k, v = (normal(dtype, n, size)(1) for n in (heads, 1024 * groups, 1024 * groups))
                k, v = (x.view(1, 1024, groups, size) for x in (k, v))
                k[:, length:], v[:, length:] = 0, 0
                mask = torch.zeros(1, 1, 1, 1024, dtype=dtype)
                mask[..., length:] = float("-inf")
                own = -(-length // KV_BLOCK) * KV_BLOCK

                def at(
                    rows: int, context: int, q: Tensor = q, k: Tensor = k, v: Tensor = v, m: Tensor = mask
                ) -> Tensor:
                    seen = slice(0, context)
                    others = normal(q.dtype, *q.shape[1:])(rows - 1)
                    ks, vs = (x[:, seen].expand(rows, -1, -1, -1) for x in (k, v))
                    return attend_rows(torch.cat((others, q)), ks, vs, m[..., seen].expand(rows, -1, -1, -1))[-1]

                wanted = at(1, own)
                tried += 1
                among += any(not torch.equal(at(count, own), wanted) for count in COUNTS)
                longer += any(not torch.equal(at(3, context), wanted) for context in range(own, 1025, KV_BLOCK))
                unpadded += not torch.equal(at(1, length), wanted)
            shape = {"heads": heads, "kv_heads": groups, "head_dim": size, **_dtype(dtype)}
            counts = {"differ_among_others": among, "differ_in_longer_padding": longer, "differ_unpadded": unpadded}
            rows.append({"measured": "attention", **shape, "lengths": tried, **counts})
    return rows


def _dtype(dtype: torch.dtype) -> dict[str, str]:
    return {"dtype": dtype_name(dtype)}


def speed(name: str, model: Any, prompts: list[list[int]], length: int, repetitions: int) -> Rows:
    """Tokens/s of whole runs (prompts included) and of turns without prompt tokens."""
    start = time.perf_counter()
    counts = Invariant(model).counts
    rows: Rows = [{"measured": "check", "model": name, "s": round(time.perf_counter() - start, 3), "counts": counts}]
    engines = {mode: Engine(model, batch_invariant=mode == "invariant") for mode in ("normal", "invariant")}
    for concurrency in (1, 8, 32):
        timed: dict[str, list[tuple[float, float]]] = {mode: [] for mode in engines}
        for repetition in range(repetitions + 1):  # the first warms up
            for mode in sorted(engines, reverse=repetition % 2 == 1):
                seen = run(engines[mode], prompts[:concurrency], length)
                if repetition:
                    timed[mode].append(seen)
        for part, what in enumerate(("all", "decode")):
            each = {mode: [seen[part] for seen in values] for mode, values in timed.items()}
            shares = [i / n for i, n in zip(each["invariant"], each["normal"], strict=True)]
            row = {"measured": "speed", "model": name, "concurrency": concurrency, "turns": what}
            for mode, values in each.items():
                row |= {f"{mode}_tokens_per_s": _spread(values)}
            rows.append(row | {"share_of_normal": _spread(shares, 3)})
    return rows


def run(engine: Engine, prompts: list[list[int]], length: int) -> tuple[float, float]:
    for prompt in prompts:
        engine.submit(prompt, Sampling(max_tokens=length, ignore_eos=True))
    times, tokens = [0.0, 0.0], [0, 0]
    while not engine.idle:
        prefills = any(s.prefilling for s in engine.scheduler.running.values()) or engine.scheduler.waiting
        start = time.perf_counter()
        chunks = engine.step()
        spent, made = time.perf_counter() - start, sum(chunk.token_id is not None for chunk in chunks)
        for part in (0,) if prefills else (0, 1):
            times[part] += spent
            tokens[part] += made
    return tokens[0] / times[0], tokens[1] / times[1]


def _spread(values: list[float], digits: int = 1) -> list[float]:
    """[median, lowest, highest]."""
    return [round(value, digits) for value in (statistics.median(values), min(values), max(values))]


if __name__ == "__main__":
    main()
