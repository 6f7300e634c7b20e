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
