"""anydepth beside transformers.generate on SmolLM2-135M: same prompts, same answer length, same machine, one run.

Full depth, greedy, float32, prefill included; transformers uses its K/V cache and a padless batch. The two take turns,
and each figure is a median with its range. The roofline is from bandwidth and GFLOP/s measured in the same run.

    python benchmarks/vs_transformers.py --out runs/vs_transformers
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from anydepth.bench.roofline import measure_machine, spread
from anydepth.bench.rows import write_rows
from anydepth.bench.throughput import Cell, Timing, run_cell
from anydepth.models.base import Model
from anydepth.models.load import Checkpoint, load_checkpoint
from anydepth.types import Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=60)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/vs_transformers"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    checkpoint = load_checkpoint(options.model)
    theirs = transformers_twin(checkpoint)
    rows = []
    for concurrency in options.concurrency:
        rows.append(compare(checkpoint.model, theirs, concurrency, options))
        print_row(rows[-1])
    settings = vars(options) | {"benchmark": "vs_transformers", "out": None}
    write_rows(options.out, settings=settings, rows=rows, checkpoint=checkpoint)


def transformers_twin(checkpoint: Checkpoint) -> Any:
    """transformers' Llama with the very weights of our model, without its slow reading of GGUF."""
    import transformers

    shape, config = checkpoint.model.shape, checkpoint.config
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
    )
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{key: config[key] for key in keys}))
    theirs.load_state_dict(dict(checkpoint.model.slots()), strict=not config["tie_word_embeddings"])
    theirs.tie_weights()
    checkpoint.model.pack()
    assert theirs.get_input_embeddings().weight.shape == (shape.vocab, shape.hidden)
    return theirs.eval()


def compare(model: Model, theirs: Any, concurrency: int, options: argparse.Namespace) -> dict[str, Any]:
    """Interleaved timings of both at one concurrency."""
    generator = torch.Generator().manual_seed(concurrency)
    prompts = torch.randint(100, model.shape.vocab, (concurrency, options.prompt_tokens), generator=generator)
    lengths = [options.new_tokens] * concurrency
    machine = measure_machine(model)
    cell = Cell("never", Sampling())
    ours: list[Timing] = []
    seconds: list[float] = []
    for repetition in range(options.repetitions + 1):  # the first pair warms up
        timing = run_cell(model, cell, prompts.tolist(), lengths, machine, concurrency=concurrency)
        theirs_s = time_transformers(theirs, prompts, options.new_tokens)
        print(f"C={concurrency} pair {repetition}: {timing.seconds:.2f} s, {theirs_s:.2f} s", flush=True)
        if repetition:
            ours.append(timing)
            seconds.append(theirs_s)
    tokens = concurrency * options.new_tokens
    ratio = spread(s / t.seconds for s, t in zip(seconds, ours, strict=True))
    speed, low, high = spread(tokens / t.seconds for t in ours)
    theirs_speed, theirs_low, theirs_high = spread(tokens / s for s in seconds)
    limit = ours[0].work.bound_s
    return {
        "concurrency": concurrency,
        "tokens_per_s": speed,
        "tokens_per_s_low": low,
        "tokens_per_s_high": high,
        "transformers_tokens_per_s": theirs_speed,
        "transformers_low": theirs_low,
        "transformers_high": theirs_high,
        "ratio": ratio[0],
        "ratio_low": ratio[1],
        "ratio_high": ratio[2],
        "roofline_tokens_per_s": tokens / limit,
        "roofline_share": spread(limit / t.seconds for t in ours)[0],
        "transformers_roofline_share": limit / spread(seconds)[0],
        "gflops_per_s": machine.flops_per_s / 1e9,
        "gbytes_per_s": machine.bytes_per_s / 1e9,
    }


@torch.inference_mode()
def time_transformers(theirs: Any, prompts: torch.Tensor, new_tokens: int) -> float:
    """Seconds of one greedy generate of exactly new_tokens tokens a row."""
    start = time.perf_counter()
    out = theirs.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    spent = time.perf_counter() - start
    assert out.shape[1] == prompts.shape[1] + new_tokens
    return spent


def print_row(row: dict[str, Any]) -> None:
    def figure(name: str, low: str, high: str, places: int = 1) -> str:
        return f"{row[name]:.{places}f} ({row[low]:.{places}f}-{row[high]:.{places}f})"

    print(
        f"C={row['concurrency']}: anydepth {figure('tokens_per_s', 'tokens_per_s_low', 'tokens_per_s_high')} tokens/s, "
        f"transformers {figure('transformers_tokens_per_s', 'transformers_low', 'transformers_high')}, "
        f"ratio {figure('ratio', 'ratio_low', 'ratio_high', 2)}; roofline {row['roofline_tokens_per_s']:.1f} tokens/s, "
        f"roofline_share {row['roofline_share']:.2f} (transformers {row['transformers_roofline_share']:.2f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
