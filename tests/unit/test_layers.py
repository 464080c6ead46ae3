"""Imports go downwards only (DESIGN §16). The directions are data; a breach is named."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import nomarr_systemd

ROOT = Path(nomarr_systemd.__file__).parent

# From the top down. A module may import from its own layer and from those below it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli", "demo", "operate"),
    ("worker", "supervisor", "controller", "postmortem"),
    ("jobs",),
    ("ledger",),
    ("live",),
    ("systemd",),
    ("store",),
    ("host",),
    ("config",),
    ("core",),
)
RANK = {name: len(LAYERS) - depth for depth, names in enumerate(LAYERS) for name in names}

IMPURE = {
    "asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "select",
    "shutil", "socket", "sqlite3", "subprocess", "sys", "tempfile", "threading", "time", "uuid",
}  # fmt: skip

# A package from outside, and the only modules that may import it.
ONLY_IN = {
    "arango": ("store.arango",),
    "click": ("cli", "demo"),
    "jinja2": ("cli", "systemd", "postmortem"),
    "sqlite3": ("store.sqlite",),
    "systemd": ("systemd", "supervisor"),
    "sdnotify": ("worker",),
}


def modules() -> dict[str, set[str]]:
    """Every module of ours, without the package's name, and all that it imports."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative imports hide the direction"
                module = node.module or ""
                imported.add(module)
                imported.update(f"{module}.{alias.name}" for alias in node.names)
        found[name] = imported
    return found


def breaches(found: dict[str, set[str]]) -> list[str]:
    result = []
    for name, imported in found.items():
        layer = name.split(".")[0]
        if layer == "__init__":
            continue
        if layer not in RANK:
            result.append(f"{name}: no layer is known for it; add it to LAYERS")
            continue
        for target in sorted(imported):
            parts = target.split(".")
            if parts[0] == "nomarr_systemd" and len(parts) > 1:
                if RANK.get(parts[1], 0) > RANK[layer]:
                    result.append(f"{name} imports {target}: {layer} lies below {parts[1]}")
            elif layer == "core" and parts[0] in IMPURE:
                result.append(f"{name} imports {target}: the core is pure")
            elif parts[0] in ONLY_IN and not name.startswith(ONLY_IN[parts[0]]):
                allowed = ", ".join(ONLY_IN[parts[0]])
                result.append(f"{name} imports {target}: only {allowed} may")
    return result


def test_imports_go_downwards() -> None:
    assert breaches(modules()) == []


def test_a_breach_is_found_and_named() -> None:
    found = {
        "core.policy": {"time", "nomarr_systemd.store.protocol"},
        "store.sqlite": {"nomarr_systemd.ledger.ledger", "arango"},
        "newcomer": set(),
    }
    assert breaches(found) == [
        "core.policy imports nomarr_systemd.store.protocol: core lies below store",
        "core.policy imports time: the core is pure",
        "store.sqlite imports arango: only store.arango may",
        "store.sqlite imports nomarr_systemd.ledger.ledger: store lies below ledger",
        "newcomer: no layer is known for it; add it to LAYERS",
    ]


def test_no_import_cycles() -> None:
    """By walking: a module reaches itself only over a cycle."""
    found = modules()
    edges = {
        name: {t.removeprefix("nomarr_systemd.") for t in imported} & found.keys() - {name}
        for name, imported in found.items()
    }
    for start in edges:
        seen: set[str] = set()
        todo = set(edges[start])
        while todo:
            module = todo.pop()
            assert module != start, f"{start} imports itself over {sorted(seen)}"
            if module not in seen:
                seen.add(module)
                todo |= edges[module]


def test_the_controllers_imports_stay_cheap() -> None:
    """What a controller on SQLite needs, imported for real, and what must not come with it."""
    names = ["nomarr_systemd.controller.main", "nomarr_systemd.store.sqlite.store"]
    heavy = ["arango", "jinja2", "click", "asyncio", "dataclasses", "logging", "tomllib", "inspect"]
    code = (
        f"import sys, {', '.join(names)}\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
