"""The reference is worth something only while it shares no code with what it judges."""

import ast
import sys
from pathlib import Path

import anydepth

ROOM = Path(anydepth.__file__).parent / "reference"
TESTS = Path(__file__).parent
ALLOWED = {"torch", "numpy", "anydepth.reference", *sys.stdlib_module_names}


def imported(path: Path) -> set[str]:
    """Packages that a file imports; of anydepth the room."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {_room(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(_room(node.module) if node.level == 0 else "(relative)")
        elif isinstance(node, ast.Name) and node.id in ("__import__", "exec", "eval"):
            found.add(node.id)
    return found


def _room(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("anydepth") else name.partition(".")[0]


def test_reference_imports_only_torch_numpy_and_the_standard_library():
    files = [*ROOM.glob("*.py"), TESTS.parent / "equality.py"]
    assert len(files) >= 7
    for path in files:
        assert imported(path) - ALLOWED == set(), path.name
        assert "importlib" not in imported(path), path.name


def test_reference_tests_do_not_import_the_rest_of_the_package_either():
    for path in TESTS.glob("test_*.py"):
        if path != Path(__file__):
            assert imported(path) <= {*ALLOWED, "pytest", "hypothesis"}, path.name


def test_the_check_sees_an_import(tmp_path):
    sample = tmp_path / "sample.py"
    sample.write_text("import torch\ndef f():\n    from anydepth.models import base\nimport anydepth.reference.model\n")
    assert imported(sample) - ALLOWED == {"anydepth.models"}
