"""What several commands share: options, and how a result ends as a line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from anydepth.certificate import EXIT_SETTINGS
from anydepth.profile import Profile, policy_of, profile_path
from anydepth.types import Sampling

Model = Annotated[
    str, typer.Option("--model", "-m", help="nano, nano-plain, smollm2-135m, a folder, a .gguf file or a hub id.")
]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; 1 is best on a busy machine.")]

# Fields of Sampling.
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")]
N = Annotated[int, typer.Option("--n", help="Answers per prompt.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")]
StopTokenId = Annotated[list[int] | None, typer.Option(help="Stop id; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")]
ExitPolicy = Annotated[str | None, typer.Option(help="never, fixed, interval, gate_cdf, confidence, probe or trace.")]
ExitThreshold = Annotated[float, typer.Option(help="Below 1: leave when the gate's probability reaches it.")]
MinDepth = Annotated[int, typer.Option(help="Never leave before this segment.")]
MaxDepth = Annotated[int | None, typer.Option(help="Always leave at this segment.")]
Depth = Annotated[int | None, typer.Option(help="Read every token at this depth.")]
Interval = Annotated[int | None, typer.Option(help="Every n-th token at full depth, others at --shallow-depth.")]
ShallowDepth = Annotated[int | None, typer.Option(help="Depth of the tokens between, with --interval.")]

ForceFinalExit = Annotated[
    bool,
    typer.Option("--force-final-exit", help="Never leave early, as --exit-policy never; no exit setting beside it."),
]

# Options of LLM.
Fill = Annotated[
    str | None,
    typer.Option(
        help="K/V of skipped depths: full (default of layered models), last_exited (default of looped ones), deferred, "
        "project (layered only) or shared (looped only)."
    ),
]
Signals = Annotated[
    str, typer.Option(help="sync, exact, resident or delayed: when the host learns that a token leaves.")
]
Lateness = Annotated[int | None, typer.Option(help="Turns a signal comes late; of late signals 1.")]
Segments = Annotated[int | None, typer.Option(help="Layered models: layers a segment.")]
Dtype = Annotated[str | None, typer.Option(help="float32, float64, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:0, ...")]
GateDtype = Annotated[str, typer.Option(help="bfloat16 repeats the released exit arithmetic.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
CertificateFile = Annotated[Path | None, typer.Option(help="Of `anydepth calibrate`: answer by its setting.")]
Heads = Annotated[Path | None, typer.Option(help="Layered models: a folder of exit heads.")]
ProfileNames = Annotated[
    list[str] | None,
    typer.Option("--profile", help="Thresholds of confidence and probe: a .toml, or a name beside the heads; repeat."),
]
MaxBatch = Annotated[int, typer.Option(help="Answers under way at a time.")]
PendingPositions = Annotated[int | None, typer.Option(help="Positions of an answer that may wait under deferred: 256.")]
BatchInvariant = Annotated[
    bool,
    typer.Option("--batch-invariant", help="The same bits whatever else is in the batch (docs/batch-invariance.md)."),
]

POLICY_FIELDS = ("exit_policy", "exit_threshold", "depth", "interval", "trace")  # that name or imply a policy

LLM_OPTIONS = (
    "fill",
    "signals",
    "lateness",
    "segments",
    "dtype",
    "device",
    "gate_dtype",
    "revision",
    "certificate",
    "heads",
    "max_batch",
    "pending_positions",
    "batch_invariant",
)


def finish(command: str, result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"command": command, "version": 1, "result": result}, ensure_ascii=False, default=str))


def sampling_of(params: Mapping[str, Any]) -> Sampling:
    """The Sampling that a command's options mean."""
    given = {field.name: params[field.name] for field in fields(Sampling) if field.name in params}
    if params.get("force_final_exit"):
        beside = [name for name in EXIT_SETTINGS if given.get(name) not in (None, getattr(Sampling(), name))]
        if beside:
            said = ", ".join(f"--{name.replace('_', '-')}" for name in beside)
            raise ValueError(f"--force-final-exit runs every token at full depth, and {said} says another: give one")
        given["exit_policy"] = "never"
    unsaid = all(given.get(name) in (None, getattr(Sampling(), name)) for name in POLICY_FIELDS)
    if unsaid and params.get("profile_names") and not params.get("certificate"):
        given["exit_policy"] = _policy_of(params["profile_names"], params.get("heads"))
    return Sampling(**{**given, "stop": params["stop"] or (), "stop_token_ids": params["stop_token_id"] or ()})


def _policy_of(names: Sequence[str], heads: str | Path | None) -> str:
    """The policy that a profile is for. ValueError where it is for both, and for several profiles."""
    profiles = [Profile.read(profile_path(name, heads)) for name in names]
    policy = policy_of(profiles)
    if policy is None:
        raise ValueError(
            f"--profile {' '.join(names)} may be used by {' and '.join(profiles[0].policies) or 'nobody'}, and nothing "
            f"says by which; give --exit-policy, or --force-final-exit for full depth"
        )
    return policy


def llm_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """The options of LLM that a command was given or has by default."""
    return {name: params[name] for name in LLM_OPTIONS} | {"profile": params["profile_names"] or ()}


def passed(context: typer.Context) -> dict[str, Any]:
    """The options that stand on the command line."""
    given = {
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    return {name: context.params[name] for name in context.params if name in given}


def read_fields(text: str) -> dict[str, Any]:
    """ "exit_threshold=0.5,fill=full" as settings; values are JSON where they can be."""
    given: dict[str, Any] = {}
    for part in _outside_brackets(text):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{text!r}: {part!r} is no setting; write name=value, separated by commas")
        try:
            given[key.strip()] = json.loads(value)
        except ValueError:
            given[key.strip()] = value.strip()
    return given


def _outside_brackets(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part.strip()]
