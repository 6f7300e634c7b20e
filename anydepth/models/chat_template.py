"""Chat templates: jinja2 in its sandbox, with the globals that released templates rely on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """{% generation %} marks the assistant's text for training masks; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 (as its base class declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The chat's text. Raises ValueError where messages have the wrong form or the template refuses them."""
    if isinstance(messages, str | Mapping) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise ValueError(
            'messages must be a list of {"role": ..., "content": ...}; '
            "roles are what the template knows, mostly system, user, assistant"
        )
    try:
        return compiled(template).render(messages=list(messages), **{"tools": None, "documents": None, **variables})
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(
            f"the chat template cannot use these messages ({type(error).__name__}: {error}); "
            f"check that each content is what it expects, mostly text"
        ) from error


@lru_cache(maxsize=8)
def compiled(template: str) -> Template:
    # Released templates are written for these two settings.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as written, where jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise TemplateError(message)
