"""What the README shows is what the Records say, and its Python runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_tables_are_made_from_the_records():
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "scripts/readme_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = (ROOT / "README.md").read_text()
    assert tables.with_tables(text) == text, "run: python scripts/readme_tables.py"
    page = (ROOT / "docs/deferred.md").read_text()
    assert tables.with_split(page) == page, "run: python scripts/readme_tables.py"


def test_first_line_names_the_system_packages():
    first = (ROOT / "README.md").read_text().splitlines()[0]
    assert "apt-get install" in first and "make" in first and "python3-venv" in first


def test_python_example_runs(capsys):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    exec(compile(code, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert "Eve has 8 . #### 8" in said


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        if not (ROOT / target).exists():
            pytest.fail(f"the README links to {target}, which is not there")
