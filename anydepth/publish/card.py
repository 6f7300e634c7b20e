"""What the card of exported exit heads says beyond that of their training. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from anydepth.certificate import FILE, NEVER, Certificate, describe
from anydepth.profile import FOLDER, Exit, Profile

_EXACT = """Under the fill `full` every layer runs and only the readout is chosen: that says what leaving early would
cost, and saves no work. `fill="project"` skips layers, `"deferred"` runs them later; a certificate is for one fill."""
_CERTIFIED = "The certificate is for this fill; another one is refused with it."
_APPROXIMATE = """`fill="project"` skips layers and approximates their K/V, `"deferred"` runs them later, exactly; under
`"full"`, the default, every layer runs and no work is saved."""
TESTS = tuple(field.name for field in fields(Exit) if field.name != "layer")


def use_text(
    base: str,
    profiles: Sequence[Profile],
    *,
    calibrations: Sequence[Mapping[str, Any]] = (),
    certificate: Certificate | None = None,
    manifest: str | None = None,
) -> str:
    """How to load the folder, and with which thresholds: Markdown."""
    parts = [_load(base, profiles, certificate)]
    if not profiles:
        parts.append(
            "There are no profiles yet: `anydepth calibrate` chooses the thresholds at which a token may leave."
        )
    else:
        parts += ["## Profiles", _thresholds(profiles)]
    for calibration in calibrations:
        parts.append(_measured(calibration, profiles))
    if certificate is not None:
        parts += ["## Certificate", f"{describe(certificate)}.\n\n`{FILE}` says it in full."]
    if manifest is not None:
        parts += [
            "## Segments over devices and hosts",
            f"`{manifest}` says which segments go where; `anydepth export --segments FOLDER/{manifest} PARTS` makes\n"
            "the workers' parts.",
        ]
    return "\n\n".join(parts)


def hashes_text(model_hash: str, files: Mapping[str, str]) -> str:
    """sha256 of the backbone and of files."""
    lines = ["## Hashes", "| | sha256 |", "|---|---|", f"| the backbone's tensors | `{model_hash}` |"]
    return "\n".join([*lines, *(f"| `{name}` | `{sha256}` |" for name, sha256 in files.items())]) + "\n"


def _load(base: str, profiles: Sequence[Profile], certificate: Certificate | None) -> str:
    options = [f'"{base}"', 'heads="FOLDER"']
    if certificate is not None:
        shown = [p for p in profiles if certificate.chosen != NEVER and p.name == certificate.chosen.get("profile")]
        options += [f'profile="{shown[0].name}"'] if shown else []
        options += [f'dtype="{certificate.dtype}"', f'fill="{certificate.fill}"', f'certificate="FOLDER/{FILE}"']
        return _usage(options, _EXACT if certificate.fill == "full" else _CERTIFIED)
    if not profiles:
        return f"    LLM({', '.join(options)})"
    return _usage([*options, f'profile="{profiles[0].name}"', 'fill="project"'], _APPROXIMATE)


def _usage(options: Sequence[str], says: str) -> str:
    chat = 'llm.chat([{"role": "user", "content": "..."}])'
    return f"    llm = LLM({', '.join(options)})\n    {chat}  # or llm.generate(prompt)\n\n{says}"


def _thresholds(profiles: Sequence[Profile]) -> str:
    layers = sorted({exit.layer for profile in profiles for exit in profile.exits})
    lines = [
        "What must hold for a token to leave: `probe` (its probability), `logit` (the largest) and `margin` (its lead",
        "over the second) at least, `entropy` (nats, of softmax(logits / T)) at most. A dash: no token leaves there.",
        f"All digits are in `{FOLDER}/`.",
        "",
        _row("profile", *(f"after layer {layer}" for layer in layers)),
        _row(*["---"] * (1 + len(layers))),
    ]
    for profile in profiles:
        exits = {exit.layer: exit for exit in profile.exits}
        lines.append(_row(profile.name, *(_cell(profile, exits.get(layer)) for layer in layers)))
    return "\n".join(lines)


def _cell(profile: Profile, exit: Exit | None) -> str:
    if exit is None:
        return "-"
    said = [f"{name} {value:.4g}" for name in TESTS if (value := getattr(exit, name)) is not None]
    if exit.entropy is not None:
        said.append(f"T {profile.gate_temperature:.4g}")
    return ", ".join(said)


def _measured(calibration: Mapping[str, Any], profiles: Sequence[Profile]) -> str:
    """What the profiles' calibration found on the prompts on which nothing was fitted."""
    sources = ", ".join(f"`{source['file']}` (sha256 {source['sha256'][:16]})" for source in calibration["sources"])
    lines = [
        "Measured on full depth's own greedy answers, teacher-forced and with full depth's K/V, to prompts on which",
        f"nothing was fitted, of {sources}. `agrees`: tokens that are full depth's; `n`: tokens. By",
        "",
        f"    {calibration['command']}",
        "",
        _row("profile", "agrees", "mean layer", "leave early", "n", "prompts"),
        _row(*["---"] * 6),
    ]
    for profile in profiles:
        if profile.name in calibration["profiles"]:
            of = calibration["profiles"][profile.name]["certify"]
            last = max(of["left_after_layer"], key=int)
            early = 1 - of["left_after_layer"][last] / max(1, of["rows"])
            agrees, layer = f"{100 * of['agreement']:.1f} %", f"{of['mean_layers']:.1f} of {last}"
            lines.append(
                _row(profile.name, agrees, layer, f"{100 * early:.1f} %", f"{of['rows']:,}", f"{of['questions']:,}")
            )
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
