"""`anydepth rollout`: groups of answers to a file of prompts, as a Record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anydepth.cli_options import (
    AsJson,
    BatchInvariant,
    CertificateFile,
    Depth,
    Device,
    Dtype,
    ExitPolicy,
    ExitThreshold,
    Fill,
    ForceFinalExit,
    GateDtype,
    Heads,
    IgnoreEos,
    Interval,
    Lateness,
    MaxBatch,
    MaxDepth,
    MaxTokens,
    MinDepth,
    Model,
    N,
    PendingPositions,
    ProfileNames,
    Revision,
    Segments,
    ShallowDepth,
    Signals,
    Stop,
    StopTokenId,
    Temperature,
    Threads,
    TopK,
    TopP,
    finish,
    llm_options,
    passed,
    sampling_of,
)

app = typer.Typer()


@app.command()
def rollout(
    context: typer.Context,
    prompts: Annotated[Path, typer.Argument(help="A JSONL: prompt, prompt_ids or messages a line, perhaps an id.")],
    out: Annotated[Path, typer.Option(help="Folder of the Record; goes on there.")],
    model: Model = "nano",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    seed: Annotated[int, typer.Option(help="64-bit seed, of which each answer's own is made.")] = 0,
    n: N = 1,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    logprobs: Annotated[str, typer.Option(help="processed (of what was drawn from) or raw.")] = "processed",
    exit_policy: ExitPolicy = None,
    exit_threshold: ExitThreshold = 1.0,
    min_depth: MinDepth = 1,
    max_depth: MaxDepth = None,
    depth: Depth = None,
    interval: Interval = None,
    shallow_depth: ShallowDepth = None,
    force_final_exit: ForceFinalExit = False,
    threads: Threads = None,
    fill: Fill = None,
    signals: Signals = "sync",
    lateness: Lateness = None,
    segments: Segments = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    gate_dtype: GateDtype = "float32",
    revision: Revision = None,
    certificate: CertificateFile = None,
    heads: Heads = None,
    profile_names: ProfileNames = None,
    max_batch: MaxBatch = 32,
    pending_positions: PendingPositions = None,
    batch_invariant: BatchInvariant = False,
    as_json: AsJson = False,
) -> None:
    """Groups of answers for reinforcement learning, one line an answer; an interrupted run goes on where it stopped."""
    import torch

    from anydepth.engine.llm import LLM
    from anydepth.progress import bars
    from anydepth.rollout.record import read_prompts, write_rollout
    from anydepth.rollout.show import print_rollout

    if threads is not None:
        torch.set_num_threads(threads)
    sampling = sampling_of(context.params)
    llm = LLM(model, **llm_options(context.params))
    asks = read_prompts(prompts, llm, sampling)
    given = {name: value for name, value in passed(context).items() if name not in ("out", "prompts", "as_json")}
    with bars("answers", total=len(asks) * n) as (answers,):
        record = write_rollout(
            llm, asks, sampling, out=out, passed=given, threads=torch.get_num_threads(), progress=answers.advance
        )
    print_rollout(record)
    finish("rollout", {"out": out, "status": record.status, **record.aggregates}, as_json)
