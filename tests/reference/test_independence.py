"""The reference is worth something only while it shares no code with what it judges."""

import ast
import sys
from pathlib import Path

HERE = Path(__file__).parent
ALLOWED = {"torch", "numpy", *sys.stdlib_module_names}


def imported_roots(path: Path) -> set[str]:
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                roots.add(node.module.partition(".")[0])
            elif node.level > 1:
                roots.add("(outside)")
        elif isinstance(node, ast.Name) and node.id in ("__import__", "exec", "eval"):
            roots.add(node.id)
    return roots


def test_reference_imports_only_torch_numpy_and_the_standard_library():
    files = [*(p for p in HERE.glob("*.py") if not p.name.startswith("test_")), HERE.parent / "equality.py"]
    assert len(files) >= 7
    for path in files:
        assert imported_roots(path) - ALLOWED == set(), path.name
        assert "importlib" not in imported_roots(path), path.name


def test_reference_tests_do_not_import_the_package_either():
    for path in HERE.glob("*.py"):
        assert "anydepth" not in imported_roots(path), path.name


def test_the_check_sees_an_import(tmp_path):
    sample = tmp_path / "sample.py"
    sample.write_text("import torch\ndef f():\n    from anydepth.models import base\n")
    assert imported_roots(sample) - ALLOWED == {"anydepth"}
