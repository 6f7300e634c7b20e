"""Who may import whom, read from the syntax trees, and what must load without torch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import anydepth

ROOT = Path(anydepth.__file__).parent
SHARED = {"types", "dtypes", "record", "stats", "provenance", "certificate", "profile", "progress", "table_parts"}
# Room -> rooms it may import, itself aside. Siblings (eval, bench, train) do not know each other.
MAY_IMPORT = {
    "types": set(),
    "dtypes": set(),
    "record": {"types"},
    "certificate": {"types", "record"},
    "stats": set(),
    "profile": {"types"},
    "progress": set(),
    "table_parts": set(),
    "reference": set(),  # shares no code with what it judges
    "provenance": {"anydepth"},  # whose version it reports
    "ops": SHARED,
    "models": SHARED | {"ops"},
    "exits": SHARED | {"ops", "models"},
    "engine": SHARED | {"ops", "models", "exits"},
    "train": SHARED | {"ops", "models", "exits"},
    "eval": SHARED | {"ops", "models", "exits", "engine", "reference"},
    "bench": SHARED | {"ops", "models", "exits", "engine"},
    "calibrate": SHARED | {"models", "exits", "engine", "train", "eval"},
    "rollout": SHARED | {"models", "exits", "engine", "train"},
    "pipeline": SHARED | {"ops", "models", "exits", "engine"},
    "publish": SHARED | {"models", "train", "pipeline"},
    "diagnose": SHARED | {"models", "exits", "engine", "eval", "reference"},
}
COMMANDS = {
    "__main__",
    "cli",
    "cli_calibrate",
    "cli_diagnose",
    "cli_eval",
    "cli_export",
    "cli_options",
    "cli_rollout",
    "cli_train",
    "show",
    "demo",
    "bench_arms",
}  # they may call anything below, and each other
MAY_IMPORT |= {room: {*MAY_IMPORT, *COMMANDS, "anydepth"} for room in COMMANDS}
MAY_IMPORT["anydepth"] = {"types", "engine"}  # the public names

NO_TORCH = [
    "anydepth.types",
    "anydepth.record",
    "anydepth.certificate",
    "anydepth.profile",
    "anydepth.progress",
    "anydepth.stats",
    "anydepth.provenance",
    "anydepth.cli",
    "anydepth.cli_calibrate",
    "anydepth.cli_eval",
    "anydepth.cli_diagnose",
    "anydepth.cli_export",
    "anydepth.cli_rollout",
    "anydepth.cli_train",
    "anydepth.diagnose.command",
    "anydepth.diagnose.show",
    "anydepth.rollout.answers",
    "anydepth.engine.plan",
    "anydepth.engine.scheduler",
    "anydepth.engine.pages",
    "anydepth.engine.text",
    "anydepth.models.heads_about",
    "anydepth.models.nano.questions",
    "anydepth.models.nano.tokenizer",
    "anydepth.pipeline.admission",
    "anydepth.pipeline.manifest",
    "anydepth.eval",
    "anydepth.calibrate.fit",
    "anydepth.calibrate.gates",
    "anydepth.calibrate.lines",
    "anydepth.calibrate.table",
    "anydepth.calibrate.write",
    "anydepth.publish",
]


def module_name(path: Path) -> str:
    parts = ("anydepth", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def room_of(name: str) -> str:
    return name.split(".")[1] if "." in name else name


def known(name: str) -> str:
    """The longest beginning of a dotted name that is a module of the package."""
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def imported(node: ast.AST, module: str) -> Iterator[str]:
    """Names that one import statement brings in, submodules told from their attributes."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module} has a relative import; write the whole name"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named_in_strings(node: ast.AST) -> Iterator[str]:
    """Modules of the package named by a string, as dynamic imports do."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"anydepth(\.\w+)+", node.value):
        yield re.match(r"anydepth(\.\w+)+", node.value).group()


def package_imports(module: str) -> set[str]:
    """Modules of the package that a module names anywhere: at its top, inside functions, for types, as strings."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        for name in (*imported(node, module), *named_in_strings(node)):
            if name.split(".")[0] == "anydepth":
                found.add(known(name))
    return found


def at_load(module: str) -> set[str]:
    """Names imported when the module is loaded: not those inside functions, nor under TYPE_CHECKING."""
    found, todo = set(), list(ast.parse(MODULES[module].read_text()).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            todo += node.orelse
            continue
        found.update(imported(node, module))
        todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)]
    return found


def loads(module: str, seen: dict[str, str | None]) -> dict[str, str | None]:
    """Everything that loading a module loads, each with the module that asked for it."""
    for parent in (module.rpartition(".")[0], *sorted(at_load(module))):
        name = known(parent) if parent.split(".")[0] == "anydepth" else parent.split(".")[0]
        if name and name not in seen:
            seen[name] = module
            if name in MODULES:
                loads(name, seen)
    return seen


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    """{types, record, stats} <- ops <- models <- exits <- engine <- {eval, bench, rollout} <- {diagnose, calibrate} <-
    commands; train beside them, which rollout and calibrate may use."""
    room = room_of(module)
    assert room in MAY_IMPORT, f"{room} is a new room: say in MAY_IMPORT what it may import"
    for other in package_imports(module):
        assert room_of(other) in MAY_IMPORT[room] | {room}, f"{module} imports {other}"


NEEDS_TORCH = "anydepth.eval.backends."  # but for its contract


def torch_free() -> list[str]:
    free = [name for name in MODULES if any(name == light or name.startswith(light + ".") for light in NO_TORCH)]
    return [name for name in free if not name.startswith(NEEDS_TORCH) or name.endswith((".base", ".load"))]


@pytest.mark.parametrize("module", torch_free())
def test_loading_asks_for_no_torch(module):
    seen = loads(module, {module: None})
    chain, name = [], "torch"
    while name in seen and name is not None:
        chain.append(name)
        name = seen[name]
    assert not chain, " <- ".join(chain)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_torch_is_not_loaded_in_fact():
    """The trees cannot see what other packages import."""
    load = f"[importlib.import_module(name) for name in {torch_free()!r}]"
    assert run(f"import sys, importlib; {load}; print('torch' in sys.modules)") == "False"


def test_the_package_needs_no_torch_until_an_engine_is_asked_for():
    names = "import sys, anydepth; anydepth.Sampling(depth=2); print('torch' in sys.modules, *anydepth.__all__)"
    assert run(names).split() == ["False", *anydepth.__all__]
    assert run("import sys, anydepth; anydepth.LLM, anydepth.Engine; print('torch' in sys.modules)") == "True"
    with pytest.raises(AttributeError, match="has no attribute 'LLN'"):
        anydepth.LLN  # noqa: B018


def test_rollout_has_its_names_whatever_was_imported_before():
    import anydepth.rollout.logprobs as module
    from anydepth import rollout

    assert rollout.replay is module.replay and all(getattr(rollout, name).__name__ == name for name in rollout.__all__)
    load = "import sys, anydepth.rollout; print('torch' in sys.modules)"
    assert run(load) == "False"
    with pytest.raises(AttributeError, match=r"'anydepth\.rollout' has no attribute 'Rollouts'"):
        rollout.Rollouts  # noqa: B018


def test_help_answers_in_under_three_tenths_of_a_second():
    """The best of five, in processor time: on a busy machine the clock on the wall measures the others."""
    command = [sys.executable, "-c", "from anydepth.cli import main; main()", "--help"]
    seconds = []
    for _ in range(5):
        before, wall = os.times(), time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        seconds.append(min(used or 1.0, time.perf_counter() - wall))
        assert "generate" in done.stdout and "demo" in done.stdout
    assert min(seconds) < 0.3, seconds


def test_the_rules_see_what_they_should():
    """Imports inside functions, for types and as strings count for direction; only those at load count for torch."""
    assert "anydepth.engine.llm" in package_imports("anydepth.show")
    assert "anydepth.engine.engine" in package_imports("anydepth")  # a string
    assert "anydepth.train.loop" in package_imports("anydepth.cli")  # inside a function
    assert loads("anydepth.engine.llm", {})["torch"] is not None
    assert room_of("anydepth") == "anydepth" and room_of("anydepth.engine.llm") == "engine"


@pytest.mark.parametrize(
    "line",
    ["from anydepth.engine import engine", "def f():\n    import anydepth.eval.run", "name = 'anydepth.engine.llm'"],
)
def test_an_import_against_the_arrows_is_found(line, tmp_path, monkeypatch):
    (tmp_path / "sample.py").write_text(line)
    monkeypatch.setitem(MODULES, "anydepth.models.sample", tmp_path / "sample.py")
    with pytest.raises(AssertionError, match=r"anydepth\.models\.sample imports anydepth\.e"):
        test_imports_go_one_way("anydepth.models.sample")


def test_torch_behind_another_module_is_found(tmp_path, monkeypatch):
    (tmp_path / "sample.py").write_text("from anydepth.models.base import Model")
    monkeypatch.setitem(MODULES, "anydepth.eval.sample", tmp_path / "sample.py")
    with pytest.raises(AssertionError, match=r"torch <- anydepth\.models\.base <- anydepth\.eval\.sample"):
        test_loading_asks_for_no_torch("anydepth.eval.sample")


@pytest.mark.parametrize("before, after", [(None, "1"), ("0", "0")])
def test_weights_lie_on_huge_pages_unless_it_was_said_otherwise(before, after):
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    environment |= {} if before is None else {"THP_MEM_ALLOC_ENABLE": before}
    code = "import anydepth, os; print(os.environ['THP_MEM_ALLOC_ENABLE'])"
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == after
