"""Rules about the source itself (design §2, §3, §8)."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tinycortex"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

MAX_LINES = 400


def modules_with(pattern: str) -> set[str]:
    return {name for name in MODULES if re.search(pattern, (PACKAGE / name).read_text(encoding="utf-8"))}


def called_attributes(name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((PACKAGE / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr


def test_the_import_contracts_hold() -> None:
    """Layers import downwards only, and every module has its layer."""
    pytest.importorskip("importlinter", reason="import-linter comes with the extra 'lint'")
    command = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_a_file_is_small(name: str) -> None:
    """400 lines at the most; split by subject what grows beyond."""
    assert len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("name", MODULES)
def test_a_module_says_what_it_is_for(name: str) -> None:
    """Every module begins with a docstring."""
    assert ast.get_docstring(ast.parse((PACKAGE / name).read_text(encoding="utf-8")))


def test_only_the_database_commits() -> None:
    """``transaction()`` is the one unit of work; repositories and services never end one themselves."""
    committing = {name for name in MODULES if "commit" in called_attributes(name)}
    assert committing <= {"db.py"}
    assert modules_with(r"\.commit\(") <= {"db.py"}


def test_only_the_settings_read_the_environment() -> None:
    """Whatever can be configured is a documented setting."""
    assert modules_with(r"\bos\.environ\b|\bgetenv\b|\bos import environ\b") <= {"config.py"}


def test_only_the_dialects_ask_which_engine_it_is() -> None:
    """Everything that differs between engines is behind one protocol."""
    asking = modules_with(r"dialect\.name\b|get_backend_name|get_dialect\(|drivername")
    assert {name for name in asking if not name.startswith("dialects/")} == set()


def test_only_kinds_and_handlers_compare_kinds() -> None:
    """What is special about a kind is a field of its KindSpec."""
    comparing = modules_with(r"(==|!=|\bin\b)\s*JobKind\.|\.kind\s*(==|!=)\s*[\"'J]")
    assert {name for name in comparing if not name.startswith(("handlers/", "domain/kinds.py", "memory/"))} == set()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_named_by_its_job(name: str) -> None:
    """``utils``, ``helpers`` and ``manager`` say nothing about what is inside."""
    words = set(re.split(r"[/_.]", name))
    assert words.isdisjoint({"utils", "util", "helpers", "helper", "manager", "common", "misc", "process"})


def test_no_module_keeps_mutable_state() -> None:
    """Gate, registry, emitter and flags belong to a Cortex; a module's own names are constants."""
    mutable: list[str] = []
    for name in MODULES:
        for node in ast.parse((PACKAGE / name).read_text(encoding="utf-8")).body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if isinstance(value, ast.List | ast.Set | ast.ListComp | ast.SetComp):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]
                mutable += [f"{name}: {ast.unparse(target)}" for target in targets if ast.unparse(target) != "__all__"]
    assert mutable == []


def test_the_package_is_typed() -> None:
    """``py.typed`` makes our annotations count in a host's own type check."""
    assert (PACKAGE / "py.typed").is_file()
