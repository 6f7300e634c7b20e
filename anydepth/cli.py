"""The command line: one function call a command. Heavy imports wait until a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from anydepth import cli_diagnose, cli_eval
from anydepth.cli_options import AsJson, Model, finish

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
train = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Train the embedded looped model and its gate.")
app.add_typer(cli_eval.app)
app.add_typer(cli_diagnose.app)
app.add_typer(train, name="train")


def main() -> None:
    """Entry point: user errors end with one line and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"anydepth: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(
            "anydepth: interrupted; what writes into a folder goes on from there when it is run again", file=sys.stderr
        )
        sys.exit(130)


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
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Prompts; none, or a lone -, reads one from standard input.")
    ] = None,
    model: Model = "nano",
    chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt in the model's chat template.")] = False,
    show_depth: Annotated[bool, typer.Option("--show-depth", help="Colour every token by its depth.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="64-bit seed; drawn and shown by --json if left out.")] = None,
    n: Annotated[int, typer.Option("--n", help="Answers per prompt.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="Stop id; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")] = False,
    logprobs: Annotated[str | None, typer.Option(help="raw or processed: print each token's logprob.")] = None,
    exit_policy: Annotated[str | None, typer.Option(help="never, fixed, interval, gate_cdf or trace.")] = None,
    exit_threshold: Annotated[float, typer.Option(help="Below 1: leave when the gate's probability reaches it.")] = 1.0,
    min_depth: Annotated[int, typer.Option(help="Never leave before this segment.")] = 1,
    max_depth: Annotated[int | None, typer.Option(help="Always leave at this segment.")] = None,
    depth: Annotated[int | None, typer.Option(help="Read every token at this depth.")] = None,
    interval: Annotated[
        int | None, typer.Option(help="Every n-th token at full depth, others at --shallow-depth.")
    ] = None,
    shallow_depth: Annotated[int | None, typer.Option(help="Depth of the tokens between, with --interval.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; 1 is best on a busy machine.")] = None,
    fill: Annotated[
        str | None, typer.Option(help="full, last_exited (default of looped models) or shared: K/V of skipped depths.")
    ] = None,
    signals: Annotated[
        str, typer.Option(help="sync, exact, resident or delayed: when the host learns that a token leaves.")
    ] = "sync",
    lateness: Annotated[int | None, typer.Option(help="Turns a signal comes late; of late signals 1.")] = None,
    segments: Annotated[int | None, typer.Option(help="Layered models: layers a segment.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float64, bfloat16 or float16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:0, ...")] = "cpu",
    gate_dtype: Annotated[str, typer.Option(help="bfloat16 repeats the released exit arithmetic.")] = "float32",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    certificate: Annotated[Path | None, typer.Option(help="Of `anydepth calibrate`: answer by its setting.")] = None,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant", help="The same bits whatever else is in the batch (docs/batch-invariance.md)."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Answer prompts, streaming the text."""
    from anydepth.show import stream_answers
    from anydepth.types import Sampling

    if threads is not None:
        import torch

        torch.set_num_threads(threads)

    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        n=n,
        stop=stop or (),
        stop_token_ids=stop_token_id or (),
        ignore_eos=ignore_eos,
        logprobs=logprobs,  # type: ignore[arg-type]
        exit_policy=exit_policy,
        exit_threshold=exit_threshold,
        min_depth=min_depth,
        max_depth=max_depth,
        depth=depth,
        interval=interval,
        shallow_depth=shallow_depth,
    )
    prompts = prompt or ["-"]
    if "-" in prompts:
        if len(prompts) > 1:
            raise ValueError("- stands beside other prompts; give it alone (standard input is one prompt), or none")
        prompts = [sys.stdin.read().rstrip("\n")]
        if not prompts[0]:
            raise ValueError("standard input is empty; give a prompt as an argument or pipe one in")
    options = {
        "fill": fill,
        "signals": signals,
        "lateness": lateness,
        "segments": segments,
        "dtype": dtype,
        "device": device,
        "gate_dtype": gate_dtype,
        "revision": revision,
        "certificate": certificate,
        "batch_invariant": batch_invariant,
    }
    result = stream_answers(prompts, sampling, model=model, options=options, chat=chat, show_depth=show_depth)
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
def info(model: Model = "nano", as_json: AsJson = False) -> None:
    """What a checkpoint is: shape, cost of each part, tokenizer, hashes."""
    from anydepth.show import print_info

    finish("info", print_info(model), as_json)


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
