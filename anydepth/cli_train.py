"""`anydepth train heads`: exit heads and probes for a frozen layered model."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from anydepth.cli_options import AsJson, Device, Dtype, Revision, Threads, finish

app = typer.Typer()


@app.command("heads")
def train_heads(
    out: Annotated[Path, typer.Argument(help="Folder of the heads; a run that was stopped goes on from there.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A layered model; it stays as it is.")] = "smollm2-135m",
    data: Annotated[
        list[str] | None, typer.Option(help="JSONL of prompts and responses, or FILE:500 for so many rows; repeat.")
    ] = None,
    own_answers: Annotated[
        list[str] | None, typer.Option(help="JSONL of prompts that the model itself answers, greedily; repeat.")
    ] = None,
    prepare: Annotated[
        Path | None, typer.Option(help="Folder of the tokenised data, made once; OUT/data if left out.")
    ] = None,
    only_prepare: Annotated[bool, typer.Option("--only-prepare", help="Tokenise and end.")] = False,
    max_row_tokens: Annotated[int, typer.Option(help="Longer rows are cut.")] = 512,
    answer_tokens: Annotated[int, typer.Option(help="Longest of the model's own answers.")] = 128,
    exits: Annotated[str, typer.Option(help="5: every 5 layers. 5,10,15: after these. 5, (with a comma): one.")] = "5",
    kind: Annotated[
        str, typer.Option(help="norm, low_rank or shortlist; one for all exits, or one each.")
    ] = "low_rank",
    rank: Annotated[int, typer.Option(help="Of the correction in low_rank and shortlist heads.")] = 64,
    shortlist: Annotated[int, typer.Option(help="Tokens of shortlist heads, the most frequent of the data.")] = 4096,
    temperature: Annotated[float, typer.Option(help="Of teacher and head in the KL.")] = 1.0,
    ce_weight: Annotated[float, typer.Option(help="Of the cross-entropy of the data's own tokens.")] = 0.0,
    weights: Annotated[str, typer.Option(help="Of the exits' losses; one for all, or one each.")] = "1",
    mask_prompts: Annotated[
        bool, typer.Option("--mask-prompts/--no-mask-prompts", help="Learn on answers only.")
    ] = True,
    fit: Annotated[
        int, typer.Option(help="Micro-batches that heads begin from, by regression; 0: the model's own.")
    ] = 16,
    batch_tokens: Annotated[int, typer.Option(help="Tokens packed into a micro-batch.")] = 1024,
    accumulate: Annotated[int, typer.Option(help="Micro-batches a step, over all processes.")] = 1,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 1000,
    lr: Annotated[float, typer.Option(help="Largest learning rate; warm-up, then a cosine to 0.")] = 1e-4,
    probe_lr: Annotated[float, typer.Option(help="The probes'.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps until it is reached.")] = 50,
    clip: Annotated[float, typer.Option(help="Largest norm of a step's gradient; 0: any.")] = 1.0,
    evaluate_every: Annotated[int, typer.Option(help="Steps between evaluations on held-out rows.")] = 100,
    evaluate_documents: Annotated[int, typer.Option(help="Held-out rows of one.")] = 64,
    save_every: Annotated[int, typer.Option(help="Steps between saved states.")] = 50,
    save_dtype: Annotated[str, typer.Option(help="Of the heads' file; float16 halves it.")] = "float32",
    seed: Annotated[int, typer.Option(help="Decides the order of the data.")] = 0,
    licence: Annotated[str, typer.Option(help="A sentence for the model card's licence section.")] = "",
    resume: Annotated[bool, typer.Option("--resume/--restart", help="Go on from OUT's state, or begin anew.")] = True,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Distil exit heads and probes from a frozen model's full depth.

    Several GPUs: accelerate launch --num_processes 4 -m anydepth train heads ... --device cuda --accumulate 4
    """
    import torch

    from anydepth.models.load import load_checkpoint
    from anydepth.train.head_data import Source
    from anydepth.train.head_data import prepare as prepare_data
    from anydepth.train.head_recipe import HeadRecipe, exits_of, weights_of
    from anydepth.train.head_trainer import layered
    from anydepth.train.heads import train_heads as run
    from anydepth.train.prepared import load_prepared

    if threads is not None:
        torch.set_num_threads(threads)
    peers, device = _peers(device)
    checkpoint = load_checkpoint(model, dtype=dtype, device=device, revision=revision)
    layers = layered(checkpoint).shape.layers
    recipe = HeadRecipe(
        exits=exits_of(exits, layers),
        kinds=tuple(kind.split(",")),
        weights=weights_of(weights),
        tokens=batch_tokens,
        rank=rank,
        shortlist=shortlist,
        temperature=temperature,
        ce_weight=ce_weight,
        mask_prompts=mask_prompts,
        fit=fit,
        accumulate=accumulate,
        steps=steps,
        lr=lr,
        probe_lr=probe_lr,
        warmup=warmup,
        clip=clip,
        evaluate_every=evaluate_every,
        evaluate_documents=evaluate_documents,
        save_every=save_every,
        save_dtype=save_dtype,
        seed=seed,
    ).checked(layers, checkpoint.model.shape.vocab)
    folder = prepare or out / "data"
    sources = [Source.parse(text) for text in data or []]
    sources += [Source.parse(text, own_answers=True) for text in own_answers or []]
    if peers.rank == 0:
        answer = _answers(model, answer_tokens, dtype=dtype, device=device, revision=revision)
        prepare_data(folder, sources, checkpoint, max_tokens=max_row_tokens, answer_tokens=answer_tokens, answer=answer)
    peers.wait()
    if not only_prepare:
        run(
            out,
            checkpoint,
            load_prepared(folder, checkpoint),
            recipe,
            resume=resume,
            peak=_peak,
            peers=peers,
            command=_command(),
            licence=licence,
            report=print if peers.rank == 0 else lambda line: None,
        )
    made = {"heads": None if only_prepare else str(out), "data": str(folder)}
    finish("train heads", made, as_json and peers.rank == 0)


def _peers(device: str) -> tuple[Any, str]:
    """This process among those that a launcher started, and its device."""
    from anydepth.train.parallel import Peers

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Peers(rank=0, count=1), device
    try:
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs
    except ImportError as error:
        raise ValueError("training in several processes needs accelerate: pip install accelerate") from error
    # The others wait while the first tokenises, answers prompts or evaluates; the usual 10 minutes may be too short.
    group = InitProcessGroupKwargs(timeout=timedelta(days=1))
    accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[group])
    return Peers(rank=accelerator.process_index, count=accelerator.num_processes), str(accelerator.device)


def _answers(model: str, tokens: int, **options: Any) -> Callable[[list[list[int]]], list[list[int]]]:
    """The model's greedy answers, by an engine that is made when the first are asked for."""
    made: list[Any] = []

    def answer(prompts: list[list[int]]) -> list[list[int]]:
        from anydepth import LLM, Sampling

        if not made:
            made.append(LLM(model, **options))
        return [list(output.token_ids) for output in made[0].generate(prompts, Sampling(max_tokens=tokens))]

    return answer


def _peak(model: Any) -> float:
    from anydepth.bench.roofline import measure_machine

    return measure_machine(model, repetitions=3).flops_per_s


def _command() -> str:
    """As typed, but for the places of files."""
    words = [Path(word).name if word.startswith((os.sep, "~", ".")) else word for word in sys.argv[1:]]
    return shlex.join(["anydepth", *words])
