"""What all pages share: the look, and blocks of tables that become HTML or Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anydepth.eval.numbers import digits, percent

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
# Light tints of viridis, light for shallow and darker for deep: their lightness alone tells them apart.
_TINTS = ((254, 244, 178), (186, 230, 184), (150, 204, 214), (178, 176, 226))


def tint(depth: float, segments: int) -> str:
    """CSS colour of a depth between 1 and R."""
    place = (depth - 1) / max(1, segments - 1) * (len(_TINTS) - 1)
    below = min(int(place), len(_TINTS) - 2)
    mixed = (round(a + (b - a) * (place - below)) for a, b in zip(_TINTS[below], _TINTS[below + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def facts(provenance: Mapping[str, Any], *, questions: int | None = None) -> list[tuple[str, str]]:
    """The provenance block of a Record in words."""
    p = provenance
    source, model, task = p["anydepth"], p["model"], p["task"]
    commit = f", commit {source['commit'][:12]}{' with changes' if source['dirty'] else ''}" if source["commit"] else ""
    packages = [f"{name} {version}" for name, version in p["packages"].items() if version]
    threads = [] if p["threads"] is None else [f"{p['threads']} thread{'s' if p['threads'] != 1 else ''}"]
    found = [("anydepth", source["version"] + commit)]
    if model:
        found.append(("model", f"{model['name']}, sha256 {model['hash'][:16]}"))
    if task:
        asked = "" if questions is None else f", {questions:,} questions an arm"
        found.append(("task", f"{task['name']}, sha256 {task['hash'][:16]}{asked}, seed {p['seed']}"))
    return [
        *found,
        ("machine", ", ".join([p["cpu"], *threads, *p["gpu"]])),
        ("software", ", ".join([p["os"], f"Python {p['python']}", *packages])),
        ("run", " to ".join(time for time in (p["started"], p["finished"]) if time)),
    ]


def template_environment() -> Environment:
    """jinja2 over the templates, with the number formats as filters; whatever is put in cannot become markup."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=percent, digits=digits)
    return environment


GOOD, BAD, WORDS = "good", "bad", "words"


class Cell(NamedTuple):
    """A table's cell: its figure, what stands small beside it, a mark (GOOD, BAD, WORDS or none) and a CSS colour
    behind it."""

    text: str
    note: str = ""
    mark: str = ""
    back: str = ""


class Bar(NamedTuple):
    """Shares of a whole, as (what, share, CSS colour). HTML only: Markdown leaves the column out."""

    parts: tuple[tuple[str, float, str], ...]


Row = tuple[str | Cell | Bar, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """`strong`: numbers of the rows to stand out. `folded`: shown on demand in HTML, left out of Markdown."""

    head: tuple[str, ...]
    rows: tuple[Row, ...]
    strong: frozenset[int] = frozenset()
    folded: str | None = None


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a page: a heading, what to know first, pictures, tables, and sentences after them."""

    title: str
    note: str = ""
    picture: str | None = None  # SVG, for HTML
    picture_file: str | None = None  # for Markdown
    tables: tuple[Table, ...] = ()
    lines: tuple[str, ...] = ()


def markdown(blocks: Iterable[Block], *, level: int) -> str:
    """Blocks as Markdown, with headings of this level."""
    return "\n".join(_block(block, level) for block in blocks)


def _block(block: Block, level: int) -> str:
    parts = [f"{'#' * level} {block.title}"]
    parts += [block.note] if block.note else []
    parts += [f"![{block.title}]({block.picture_file})"] if block.picture_file else []
    parts += [_table(table) for table in block.tables if table.folded is None]
    parts += ["\n".join(f"- {line}" for line in block.lines)] if block.lines else []
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    kept = [i for i in range(len(table.head)) if not any(isinstance(row[i], Bar) for row in table.rows)]
    rules = ["---" if i == 0 or _words(table, i) else "---:" for i in kept]
    lines = [_line([table.head[i] for i in kept]), f"|{'|'.join(rules)}|"]
    lines += [_line([_text(row[i]) for i in kept]) for row in table.rows]
    return "\n".join(lines)


def _words(table: Table, column: int) -> bool:
    """Whether a column has words, which stand to the left."""
    return any(isinstance(cell := row[column], Cell) and cell.mark == WORDS for row in table.rows)


def _text(cell: str | Cell | Bar) -> str:
    assert not isinstance(cell, Bar)
    if isinstance(cell, str):
        return cell
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
