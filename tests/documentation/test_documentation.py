"""The documentation tells the truth: examples run, references resolve, every setting is listed."""

import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.core import TyperGroup as Group
from typer.main import get_command

from tinycortex import Finding, FindingCode, Settings, telemetry
from tinycortex.cli.root import app as cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def python_blocks(page: Path) -> list[str]:
    return PYTHON_BLOCK.findall(page.read_text())


def rows(page: str) -> list[list[str]]:
    """Return the cells of every table row of a page, less heads and rules."""
    lines = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if not set(row[0]) <= set("-:|") and row[0] not in {"rule", "promise", "hole"}]


def resolve(symbol: str) -> object:
    """Return what a dotted path names: the longest importable part, then attributes."""
    parts = symbol.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"{symbol} cannot be imported")


def named_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(page, block, id=f"{page.stem}-{number}")
        for page in (ROOT / "README.md", ROOT / "docs" / "custom-handlers.md", ROOT / "docs" / "telemetry.md")
        for number, block in enumerate(python_blocks(page))
    ],
)
def test_an_example_runs_as_it_stands(page: Path, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who pastes an example gets a program that runs."""
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(page), "exec"), {"__name__": "__main__"})  # noqa: S102 - the project's own page
    assert list(tmp_path.glob("*.db"))


def test_the_readme_registers_a_kind_in_under_twenty_lines() -> None:
    """The first example stays short enough to be read."""
    (block,) = python_blocks(ROOT / "README.md")
    assert len([line for line in block.splitlines() if line.strip()]) < 20


@pytest.mark.parametrize("page", ["rules.md", "guarantees.md"])
def test_each_row_names_code_that_is_there(page: str) -> None:
    """A rule or promise without a symbol that holds it is only a wish."""
    listed = rows(page)
    assert listed
    for row in listed:
        symbols = re.findall(r"`(tinycortex[\w.]*)`", row[1])
        assert symbols, row
        for symbol in symbols:
            resolve(symbol)


@pytest.mark.parametrize("page", ["rules.md", "guarantees.md"])
def test_each_row_names_a_test_that_is_there(page: str) -> None:
    """A rule or promise without a test that proves it is only a wish."""
    for row in rows(page):
        references = REFERENCE.findall(row[2])
        assert references, row
        for path, name in references:
            assert name in named_in(ROOT / path), f"{path}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """A relative link names a file of the repository."""
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_setting_stands_in_the_settings_page() -> None:
    """docs/settings.md is the table that the settings themselves give."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for group, field in Settings.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        for name, setting in model.model_fields.items():
            variable = f"TINYCORTEX_{group}__{setting.alias or name}".upper()
            lines.append(f"| `{variable}` | `{setting.default}` | {setting.description} |")
    page = (ROOT / "docs" / "settings.md").read_text()
    table = "\n".join(lines)
    assert table in page, f"docs/settings.md should hold:\n{table}"


def test_every_finding_stands_in_the_operations_page() -> None:
    """docs/operations.md explains the codes that the doctor knows, each with its severity, in their order."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (section,) = re.findall(r"^## What `tinycortex doctor` finds.*?(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \| [^|]+ \| [^|]+ \|$", section, re.MULTILINE)
    assert listed == [(code.value, Finding.of(code, "").severity.value) for code in FindingCode]


def commands(group: Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    """Yield each command of the command line with the options that it takes."""
    for name, command in group.commands.items():
        if isinstance(command, Group):
            yield from commands(command, (*path, name))
        else:
            options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
            yield " ".join((*path, name)), options


def test_every_command_stands_in_the_command_line_page() -> None:
    """docs/cli.md has one row for each, with all of its options and no others."""
    group = get_command(cli)
    assert isinstance(group, Group)
    listed = {
        re.split(r" (?=[-A-Z\[…])", row[0].strip("`"))[0]: row[0] for row in rows("cli.md") if row[0] != "command"
    }
    taken = dict(commands(group))
    assert set(listed) == set(taken)
    for name, options in taken.items():
        assert set(re.findall(r"--[a-z-]+", listed[name])) == options, name


def test_every_event_stands_in_the_telemetry_page() -> None:
    """docs/telemetry.md lists the events that are told, each with its fields, in their order."""
    page = (ROOT / "docs" / "telemetry.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE)
    classes = [found for found in vars(telemetry.events).values() if isinstance(found, type)]
    told = [found for found in classes if issubclass(found, telemetry.Event) and not found.__subclasses__()]
    assert listed == [
        (event.__name__, ", ".join(f"`{field.name}`" for field in dataclasses.fields(event))) for event in told
    ]


def log_formats() -> set[str]:
    """Return the format string of every call of a module's logger."""
    levels = {"debug", "info", "warning", "error", "exception", "critical"}
    formats = set()
    for path in (ROOT / "tinycortex").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="logger"), attr=level)) if level in levels:
                    formats.add(str(ast.literal_eval(node.args[0])))
    return formats


def test_every_log_record_stands_in_the_operations_page() -> None:
    """Each record has a row that shows it, and each row shows a record that there is."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (section,) = re.findall(r"^## Log records.*?(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    listed = re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", section, re.MULTILINE)
    patterns = {text: ".+".join(map(re.escape, re.split(r"%\w", text))) for text in log_formats()}
    for text, pattern in patterns.items():
        assert any(re.fullmatch(pattern, row) for row in listed), f"no row shows {text!r}"
    for row in listed:
        assert any(re.fullmatch(pattern, row) for pattern in patterns.values()), f"nothing logs {row!r}"
