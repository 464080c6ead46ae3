"""The alert rules and the dashboard: well formed, and about metrics that there are."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = Path(__file__).parents[2] / "docs/web.md"


def test_promtool_accepts_the_alert_rules() -> None:
    command = ["promtool", "check", "rules", str(EXAMPLES / "nomarr-alerts.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_rules_and_dashboard_name_metrics_that_there_are() -> None:
    documented = set(re.findall(r"`(nomarr_[a-z_]+)`", PAGE.read_text()))
    dashboard = json.loads((EXAMPLES / "nomarr-grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    text = (EXAMPLES / "nomarr-alerts.yml").read_text() + "\n".join(queries)
    used = {name.removesuffix("_bucket") for name in re.findall(r"nomarr_[a-z_]+", text)}
    assert used
    assert used <= documented
