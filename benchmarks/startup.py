"""How soon a fresh process has the package imported and an existing file open."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import targets
from benchmarks.backlogs import url_of
from benchmarks.figures import Row
from benchmarks.plan import Plan

_IMPORT = "import tinycortex"
_OPEN = "import tinycortex + open an existing file"
_PROGRAM = """
import json, sys, time
began = time.perf_counter()
import tinycortex
imported = time.perf_counter()
tinycortex.Cortex.open(sys.argv[1]).close()
print(json.dumps([imported - began, time.perf_counter() - began]))
"""
_ROOT = Path(__file__).parents[1]


def run(plan: Plan) -> Iterator[Row]:
    """Yield both times; a process of each round, after one that fills the caches."""
    path = plan.backlogs.copy()
    _measure(path)
    found = plan.interleave("startup", {_OPEN: lambda: _measure(path)})
    yield Row(_IMPORT, "s", found[_IMPORT])
    yield Row(_OPEN, "s", found[_OPEN], targets.STARTUP_S)


def _measure(path: Path) -> dict[str, float]:
    command = [sys.executable, "-c", _PROGRAM, url_of(path)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)  # noqa: S603 - our own text
    return dict(zip((_IMPORT, _OPEN), json.loads(done.stdout), strict=True))
