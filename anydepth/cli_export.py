"""`anydepth export`: a model for transformers, a pipeline's parts, or exit heads to give away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anydepth.cli_options import AsJson, finish, passed

app = typer.Typer()

_OF_HEADS = ("profile", "certificate", "calibration", "manifest")
_OF_A_MODEL = ("format", "revision")


@app.command()
def export(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="nano, a folder, a .gguf file or a hub id; left out with --segments and --heads.")
    ],
    out: Annotated[Path | None, typer.Argument(help="A new folder, or an earlier export.")] = None,
    format: Annotated[str, typer.Option(help="hf: a folder for transformers.")] = "hf",
    segments: Annotated[
        Path | None, typer.Option(help="A manifest: write one artifact a segment of its model instead.")
    ] = None,
    heads: Annotated[Path | None, typer.Option(help="Exit heads: write them with profiles and a card instead.")] = None,
    profile: Annotated[
        list[str] | None, typer.Option(help="Of the heads, by name or path; repeat. All if left out.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="Of these profiles.")] = None,
    calibration: Annotated[list[Path] | None, typer.Option(help="A calibration.json, for the card; repeat.")] = None,
    manifest: Annotated[Path | None, typer.Option(help="Of a pipeline over these heads.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a folder that transformers loads, the released model's exit arguments in it; a pipeline's parts; or heads.

    anydepth export nano nano-hf; anydepth export --segments manifest.toml parts; anydepth export --heads heads out
    """
    given = passed(context)
    if segments is not None and heads is not None:
        raise ValueError("--segments and --heads are two exports; give one of them (--manifest goes with --heads)")
    other = segments is not None or heads is not None
    wrong = _OF_A_MODEL if other else ()
    if unused := [f"--{name}" for name in (*wrong, *(() if heads else _OF_HEADS)) if name in given]:
        what = "exit heads" if heads else "a pipeline's parts" if segments else "a model"
        raise ValueError(f"{', '.join(unused)} would change nothing of {what} that is exported; leave it out")
    if other and out is not None:
        raise ValueError(
            f"the folder to write into stands alone here, so {model!r} is one folder too many; leave it out"
        )
    if heads is not None:
        _export_heads(heads, Path(model), profile or [], certificate, calibration or [], manifest, as_json)
    elif segments is not None:
        _export_segments(segments, Path(model), as_json)
    else:
        _export_model(model, out, format, revision, as_json)


def _export_model(model: str, out: Path | None, format: str, revision: str | None, as_json: bool) -> None:
    from anydepth.models.export import export_hf
    from anydepth.types import unknown

    if out is None:
        raise ValueError("no folder is given to write into; for example: anydepth export nano nano-hf")
    if format != "hf":
        raise unknown("format", format, ["hf"])
    folder = export_hf(model, out, revision=revision)
    print(f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True) loads it, and")
    print(f"AutoTokenizer.from_pretrained({str(folder)!r}, trust_remote_code=True) its tokenizer")
    finish("export", {"folder": str(folder)}, as_json)


def _export_segments(manifest: Path, out: Path, as_json: bool) -> None:
    from anydepth.pipeline.export import export_segments
    from anydepth.pipeline.manifest import read_manifest

    folder = export_segments(read_manifest(manifest), out)
    print(f"the parts of {manifest} are in {folder}; docs/pipeline.md says how to run them")
    finish("export", {"folder": str(folder)}, as_json)


def _export_heads(
    heads: Path,
    out: Path,
    profiles: list[str],
    certificate: Path | None,
    calibrations: list[Path],
    manifest: Path | None,
    as_json: bool,
) -> None:
    from anydepth.publish.heads import export_heads

    folder = export_heads(
        heads, out, profiles=profiles, certificate=certificate, calibrations=calibrations, manifest=manifest
    )
    names = sorted(path.stem for path in folder.glob("profiles/*.toml"))
    print(f"LLM(MODEL, heads={str(folder)!r}, profile=NAME) loads it; profiles: {', '.join(names) or 'none'}")
    finish("export", {"folder": str(folder), "profiles": names}, as_json)
