"""What several commands share: options, and how a result ends as a line of JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

Model = Annotated[
    str, typer.Option("--model", "-m", help="nano, nano-plain, smollm2-135m, a folder, a .gguf file or a hub id.")
]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]


def finish(command: str, result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"command": command, "version": 1, "result": result}, ensure_ascii=False, default=str))


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
