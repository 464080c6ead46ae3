"""What may import what: downwards only, between siblings only where it is listed, the machine only
in the rooms that are for it, and helpers of tests only from tests/support. A breach is named.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import nomarr_systemd

ROOT = Path(nomarr_systemd.__file__).parent
TESTS = Path(__file__).parents[1]

# From the top down. A module may import from its own room and from the layers below it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli", "web"),
    ("operate", "demo"),
    ("worker", "supervisor", "controller", "postmortem"),
    ("jobs",),
    ("fleet",),
    ("ledger",),
    ("live",),
    ("systemd",),
    ("store",),
    ("host",),
    ("config",),
    ("core",),
)
RANK = {name: len(LAYERS) - depth for depth, names in enumerate(LAYERS) for name in names}
# Rooms of one layer that may import from each other, and why.
SIBLINGS: dict[tuple[str, str], str] = {}

IMPURE = {
    "asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "select",
    "shutil", "socket", "sqlite3", "subprocess", "sys", "tempfile", "threading", "time", "uuid",
}  # fmt: skip

# Modules by which files, processes, sockets, users and clocks are reached, and who may use them
# besides host/ and systemd/. A name stands for the module and for all below it.
MACHINE = {
    "ctypes", "datetime", "fcntl", "grp", "mmap", "multiprocessing", "os", "pathlib", "pwd",
    "random", "resource", "secrets", "select", "selectors", "shutil", "signal", "socket", "ssl",
    "subprocess", "tempfile", "threading", "time", "uuid",
}  # fmt: skip
TOUCHES_THE_MACHINE = {
    "cli": "a program: its terminal, its signals, files that a person names",
    "worker": "a program that needs no other room of ours: its pipe, its signals, its clock",
    "supervisor": "a program: its loop, its pipes, its socket",
    "controller": "a program: its FIFO, the files of hooks and of stops",
    "demo": "makes a private systemd: processes, mounts, cgroups",
    "core.death": "names of signals, which are constants",
    "jobs.owed_results": "files of the worker's, while the store is away",
    "jobs.queue": "the moment of a change, in the job",
    "jobs.store_source": "an average of how long jobs take",
    "ledger.public": "public/*.json",
    "ledger.publisher": "public/*.json",
    "ledger.spool": "spool/*.json",
    "live.client": "the socket, and who serves it",
    "operate.apply": "waits for the pipes of new workers",
    "operate.controlling": "root works with the group of the state directory",
    "operate.doctor": "looks at files, owners and modes",
    "operate.job_reading": "whether this user may open the store",
    "operate.job_store": "root becomes the owner of the store",
    "operate.leftovers": "what workers left in systemd's directories",
    "operate.store_check": "looks at files of the store as their users would",
    "operate.waiting": "the pauses between two questions to systemd",
    "postmortem.moments": "moments in the reader's time zone",
    "postmortem.report": "the name of the host",
    "postmortem.run_log": "the owner of journal entries",
    "postmortem.verdict": "moments by systemd's clock",
    "postmortem.witnesses": "moments by systemd's clock",
    "ledger.shared_archive": "which of public/*.json have changed",
    "web": "a program: its sockets, its threads, its clock",
    "store": "databases: files, locks, connections, random revisions",
}

# A package from outside, and the only modules that may import it.
ONLY_IN = {
    "arango": ("store.arango",),
    "click": ("cli",),
    "msgspec": ("core.typed_frames",),
    "prometheus_client": ("web",),
    "psycopg2": ("store.postgresql",),
    "tornado": ("web",),
    "jinja2": ("cli", "systemd", "postmortem"),
    "sqlite3": ("store.sqlite",),
    "systemd": ("systemd",),
    "sdnotify": ("worker",),
}


def read_imports(path: Path) -> set[str]:
    """Everything that a file imports, also inside functions."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            module = node.module or ""
            imported.add(module)
            imported.update(f"{module}.{alias.name}" for alias in node.names)
    return imported


def modules() -> dict[str, set[str]]:
    """Every module of ours, without the package's name, and all that it imports."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): (
            read_imports(path)
        )
        for path in sorted(ROOT.rglob("*.py"))
    }


def breaches(found: dict[str, set[str]]) -> list[str]:
    result = []
    for name, imported in found.items():
        room = name.split(".")[0]
        if room == "__init__":
            continue
        if room not in RANK:
            result.append(f"{name}: no layer is known for it; add it to LAYERS")
            continue
        for target in sorted(imported):
            parts = target.split(".")
            if parts[0] == "nomarr_systemd" and len(parts) > 1:
                other = parts[1]
                if RANK.get(other, 0) > RANK[room]:
                    result.append(f"{name} imports {target}: {room} lies below {other}")
                elif are_strangers(room, other):
                    result.append(f"{name} imports {target}: {room} and {other} are siblings")
            elif room == "core" and parts[0] in IMPURE:
                result.append(f"{name} imports {target}: the core is pure")
            elif parts[0] in ONLY_IN and not name.startswith(ONLY_IN[parts[0]]):
                allowed = ", ".join(ONLY_IN[parts[0]])
                result.append(f"{name} imports {target}: only {allowed} may")
            elif target in MACHINE and not may_touch_the_machine(name):
                result.append(f"{name} imports {target}: only host and systemd may")
    return result


def are_strangers(room: str, other: str) -> bool:
    is_sibling = other != room and RANK.get(other) == RANK[room]
    return is_sibling and (room, other) not in SIBLINGS


def may_touch_the_machine(name: str) -> bool:
    return any(is_within(name, place) for place in ("host", "systemd", *TOUCHES_THE_MACHINE))


def is_within(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}.")


def test_imports_go_downwards() -> None:
    assert breaches(modules()) == []


def test_what_may_touch_the_machine_does() -> None:
    """A name in the table that no longer needs to be there goes."""
    found = modules()
    idle = [
        place
        for place in TOUCHES_THE_MACHINE
        if not any(MACHINE & imported for name, imported in found.items() if is_within(name, place))
    ]
    assert idle == []


def test_a_breach_is_found_and_named() -> None:
    found = {
        "core.policy": {"time", "nomarr_systemd.store.protocol"},
        "store.sqlite": {"nomarr_systemd.ledger.ledger", "arango"},
        "operate.acts": {"nomarr_systemd.demo.lab", "subprocess", "click"},
        "newcomer": set(),
    }
    assert breaches(found) == [
        "core.policy imports nomarr_systemd.store.protocol: core lies below store",
        "core.policy imports time: the core is pure",
        "store.sqlite imports arango: only store.arango may",
        "store.sqlite imports nomarr_systemd.ledger.ledger: store lies below ledger",
        "operate.acts imports click: only cli may",
        "operate.acts imports nomarr_systemd.demo.lab: operate and demo are siblings",
        "operate.acts imports subprocess: only host and systemd may",
        "newcomer: no layer is known for it; add it to LAYERS",
    ]


def test_no_test_module_imports_another() -> None:
    """Helpers live in tests/support."""
    found = [
        f"{path.relative_to(TESTS)} imports {target}"
        for path in sorted(TESTS.rglob("*.py"))
        for target in sorted(read_imports(path))
        if is_within(target, "tests")
        and any(part.startswith(("test_", "conftest")) for part in target.split("."))
    ]
    assert found == []


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
    heavy += ["ctypes", "hashlib", "string", "subprocess", "systemd", "threading"]
    heavy += [f"nomarr_systemd.{name}" for name in ("core.frames", "live.answers", "live.client")]
    code = (
        f"import sys, {', '.join(names)}\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_supervisors_imports_stay_small() -> None:
    """They stay in memory on every host: each of these, with what it needs, is a megabyte."""
    large = ["asyncio", "dataclasses", "inspect", "logging", "subprocess", "systemd", "tempfile"]
    large += ["traceback", "hashlib", "msgspec", "ssl", "urllib", "email", "datetime", "sqlite3"]
    code = (
        "import sys, nomarr_systemd.supervisor.main\n"
        f"print([name for name in {large!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-IS",
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT.parent)!r})\n{code}",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_resident_programs_create_no_named_tuple_of_typing() -> None:
    """Each costs as much as six of core.named_tuple, while a worker waits for its restart."""
    names = ["controller.main", "supervisor.main", "store.sqlite.store"]
    code = (
        "import sys, typing\n"
        "made = []\n"
        "create = typing.NamedTupleMeta.__new__\n"
        "def note(kind, name, bases, body):\n"
        "    made.append(body['__module__'] + '.' + name)\n"
        "    return create(kind, name, bases, body)\n"
        "typing.NamedTupleMeta.__new__ = note\n"
        f"import {', '.join(f'nomarr_systemd.{name}' for name in names)}\n"
        "print([name for name in made if name.startswith('nomarr_systemd')])"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
