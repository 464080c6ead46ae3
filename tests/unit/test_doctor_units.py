"""Which workers doctor asks systemd about: those of a pool are alike, unless files differ."""

from __future__ import annotations

from pathlib import Path

from nomarr_systemd.operate.doctor.units import _find_own_files
from nomarr_systemd.systemd.unit_files import DROPIN


def test_workers_with_files_of_their_own_are_found(tmp_path: Path) -> None:
    ours, others = tmp_path / "etc", tmp_path / "run"
    for number in range(4):
        directory = ours / f"nomarr-worker@tag-{number}.service.d"
        directory.mkdir(parents=True)
        (directory / DROPIN).touch()
    (ours / "nomarr-worker@tag-1.service.d/override.conf").touch()
    (ours / "nomarr-worker@tag-2.service").symlink_to("/dev/null")
    (ours / "nomarr-worker@.service.d").mkdir()
    (ours / "nomarr-worker@.service").touch()
    (others / "nomarr-worker@tag-3.service.d").mkdir(parents=True)
    (others / "nomarr-worker@tag-3.service.d/50-CPUQuota.conf").touch()
    found = _find_own_files([str(ours), str(others), str(tmp_path / "nowhere")])
    assert found == {f"nomarr-worker@tag-{number}.service" for number in (1, 2, 3)}
