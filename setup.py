"""Builds a wheel that carries units, templates and the example of ``nomarrctl demo``.

They are beside the package in a checkout and in the packages for Debian and Fedora; in a wheel they
go into the package, as ``nomarr_systemd/data``. Everything else is in pyproject.toml.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DATA = ("units", "templates", "examples/tagger")


class BuildWithData(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in DATA:
            place = Path(self.build_lib, "nomarr_systemd", "data", name)
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(
                Path(__file__).parent / name, place, ignore=shutil.ignore_patterns("__pycache__")
            )


setup(cmdclass={"build_py": BuildWithData})
