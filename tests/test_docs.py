"""The Python that the pages show, prints what they say it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
SHOWN = [
    (page, *shown)
    for page in ("late-signals.md", "deferred.md", "scheduling.md", "rollout.md")
    for shown in re.findall(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", (DOCS / page).read_text(), re.S)
]


@pytest.mark.parametrize("page, code, said", SHOWN)
def test_python_prints_what_the_page_says(page, code, said, capsys):
    exec(compile(code, page, "exec"), {})
    assert capsys.readouterr().out == said


def test_every_block_is_run():
    assert len(SHOWN) == sum((DOCS / page).read_text().count("```python") for page in {page for page, *_ in SHOWN}) == 8


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", (DOCS / page).read_text()):
        assert (DOCS / target).exists(), f"{page} links to {target}, which is not there"
