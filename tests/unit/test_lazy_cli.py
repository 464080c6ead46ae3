"""nomarrctl imports what a verb needs when the verb is used."""

from __future__ import annotations

import subprocess
import sys

DEAR = ["jinja2", "systemd", "json", "sqlite3", "subprocess"]


def test_help_imports_nothing_dear() -> None:
    code = (
        "import sys\n"
        "from nomarr_systemd.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {DEAR!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
