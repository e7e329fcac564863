"""What DESIGN promises about the code itself: light imports that go down only, docstrings, tests for each room."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kveval

PACKAGE = Path(kveval.__file__).parent
TESTS = Path(__file__).parent

# From the top down. A module may import its own layer and those below it.
LAYERS = [
    {"cli", "__main__"},
    {"gate", "policy", "report", "rules", "runs", "sweep"},
    {
        "engines",
        "measure",
        "lmtasks",
        "shared_tasks",
        "ruler_tasks",
        "perplexity_tasks",
        "lm_stderr",
        "task_list",
        "models",
    },
    {"cache"},
    {"formats", "memory", "samples", "stats", "probe"},
    {"units", "errors", "resources"},
]
HEAVY = ["torch", "transformers", "vllm", "lm_eval", "pandas", "ray"]
CORE = ["formats", "memory", "samples", "stats", "gate", "policy", "rules", "units", "errors", "resources"]

MODULES = {
    ".".join(("kveval", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def layer(module: str) -> int:
    """Number of the layer of ``kveval.room...``, 0 at the top; the package itself lies below all."""
    room = module.split(".")[1] if "." in module else None
    if room is None:
        return len(LAYERS)
    found = [index for index, rooms in enumerate(LAYERS) if room in rooms]
    assert found, f"{module}: give the room '{room}' its layer in LAYERS and in DESIGN"
    return found[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of everything of kveval that a file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            # `from kveval import gate` imports a module, `from kveval import __version__` a name of the package.
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in inner]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "kveval")


def loaded_by(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_command_line_starts_without_heavy_packages() -> None:
    assert loaded_by("import kveval.cli").isdisjoint(HEAVY)


@pytest.mark.parametrize("room", CORE)
def test_the_core_works_without_torch(room: str) -> None:
    inside = [name for name in MODULES if name.split(".")[1:2] == [room]]
    assert inside, f"no module in {room}"
    assert loaded_by(f"import {', '.join(inside)}").isdisjoint({"torch", "transformers", "vllm", "lm_eval", "ray"})


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    upward = [
        f"{MODULES[module]}:{line} imports {name}"
        for line, name in imports(MODULES[module])
        if layer(name) < layer(module)
    ]
    assert not upward, "\n".join(upward)


def test_an_upward_import_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "stray.py"
    file.write_text("def f():\n    from kveval import gate, __version__\n    import kveval.cli\n    import json\n")
    seen = [name for _, name in imports(file)]
    assert seen == ["kveval.gate", "kveval", "kveval.cli"]
    assert layer("kveval.gate") < layer("kveval.formats.spec") < layer("kveval.units") < layer("kveval")


@pytest.mark.parametrize("module", [name for name, path in MODULES.items() if path.read_text(encoding="utf-8").strip()])
def test_everything_public_says_what_it_is(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    silent = [] if ast.get_docstring(tree) else [module]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            silent += [] if ast.get_docstring(node) else [f"{module}.{node.name}"]
    assert not silent, f"without a docstring: {', '.join(silent)}"


def test_each_room_has_tests() -> None:
    rooms = {name.split(".")[1] for name in MODULES if "." in name}
    tested = {name.split(".")[1] for file in TESTS.glob("test_*.py") for _, name in imports(file) if "." in name}
    tested |= {"cli", "__main__"} if any(TESTS.glob("test_cli*.py")) else set()
    assert rooms <= tested, f"no test imports {', '.join(sorted(rooms - tested))}"
