"""The command line: one function call a command. Heavy imports wait until a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from anydepth import cli_calibrate, cli_diagnose, cli_eval, cli_export, cli_rollout, cli_train
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
    sampling_of,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
train = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Train a looped model, its gate, or exit heads.")
app.add_typer(cli_eval.app)
app.add_typer(cli_export.app)
app.add_typer(cli_calibrate.app)
app.add_typer(cli_diagnose.app)
app.add_typer(cli_rollout.app)
app.add_typer(train, name="train")
train.add_typer(cli_train.app)


def main() -> None:
    """Entry point: user errors end with one line and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"anydepth: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if end.code == 130:  # what typer makes of a KeyboardInterrupt
            words = "interrupted; what writes into a folder goes on from there when it is run again"
            print(f"anydepth: {words}", file=sys.stderr)
        raise


def _version(asked: bool) -> None:
    if asked:
        from anydepth import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
) -> None:
    """Language models that decide at every token how deep to think."""


@app.command()
def generate(
    context: typer.Context,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Prompts; none, or a lone -, reads one from standard input.")
    ] = None,
    model: Model = "nano",
    chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt in the model's chat template.")] = False,
    show_depth: Annotated[bool, typer.Option("--show-depth", help="Colour every token by its depth.")] = False,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    seed: Annotated[int | None, typer.Option(help="64-bit seed; drawn and shown by --json if left out.")] = None,
    n: N = 1,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    logprobs: Annotated[str | None, typer.Option(help="raw or processed: print each token's logprob.")] = None,
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
    """Answer prompts, streaming the text."""
    from anydepth.show import stream_answers

    if threads is not None:
        import torch

        torch.set_num_threads(threads)

    sampling = sampling_of(context.params)
    prompts = prompt or ["-"]
    if "-" in prompts:
        if len(prompts) > 1:
            raise ValueError("- stands beside other prompts; give it alone (standard input is one prompt), or none")
        prompts = [sys.stdin.read().rstrip("\n")]
        if not prompts[0]:
            raise ValueError("standard input is empty; give a prompt as an argument or pipe one in")
    result = stream_answers(
        prompts, sampling, model=model, options=llm_options(context.params), chat=chat, show_depth=show_depth
    )
    finish("generate", {"outputs": result}, as_json)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for picture, page and Records.")] = Path("demo"),
    questions: Annotated[int, typer.Option(help="Held-out questions an arm.")] = 300,
    model: Model = "nano",
    as_json: AsJson = False,
) -> None:
    """Sweep fixed depths and exit thresholds of the embedded model: accuracy, compute and speed on one page."""
    from anydepth.demo import demo as run_demo

    finish("demo", run_demo(out=out, questions=questions, model=model), as_json)


@app.command()
def info(model: Model = "nano", heads: Heads = None, as_json: AsJson = False) -> None:
    """What a checkpoint is: shape, cost of each part, tokenizer, hashes; and its exit heads."""
    from anydepth.show import print_info

    finish("info", print_info(model, heads), as_json)


@train.command("loop")
def train_loop(
    out: Annotated[Path, typer.Argument(help="Folder of the model; a run that was stopped goes on from there.")],
    seed: Annotated[int, typer.Option(help="Decides initial weights and questions.")] = 0,
    copied_kv: Annotated[
        bool,
        typer.Option(
            "--copied-kv/--no-copied-kv", help="Phase C: train against copied K/V (nano) or not (nano-plain)."
        ),
    ] = True,
    processes: Annotated[int, typer.Option(help="1 or 2, one thread each.")] = 2,
    start_from: Annotated[Path | None, typer.Option(help="state-b.pt of another run of the same seed.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--restart", help="Go on from the state in OUT, or begin anew.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Train the looped model from nothing: curriculum, full task, robustness to copied K/V."""
    from anydepth.train.loop import train_loop as run

    folder = run(out, seed=seed, copied_kv=copied_kv, processes=processes, start_from=start_from, resume=resume)
    finish("train loop", {"model": str(folder)}, as_json)


@train.command("gate")
def train_gate(
    model: Annotated[Path, typer.Argument(help="Folder of a trained looped model; its gate is replaced.")],
    out: Annotated[Path | None, typer.Option(help="Write the model with the new gate here instead.")] = None,
    seed: Annotated[int, typer.Option(help="Decides the training questions.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Fit the exit gate on a frozen looped model: leave where a deeper loop would not lower the loss."""
    from anydepth.train.gate import train_gate as run

    folder = run(model, out=out or model, seed=seed)
    finish("train gate", {"model": str(folder)}, as_json)
