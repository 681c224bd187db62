"""The documentation is built as a site, strictly."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyprune.cli.app import COMMANDS
from tests._support.paths import REPO


@pytest.mark.second
@pytest.mark.process
def test_the_site_is_built_and_has_every_command(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    package = tmp_path / "pyprune"  # laid out as it is installed
    package.mkdir()
    for path in [*(path for path in (REPO / "pyprune").iterdir() if path.name != "serving"), REPO / "serving"]:
        (package / path.name).symlink_to(path)
    settings = re.sub(r"\.cache/types", str(tmp_path), (REPO / "mkdocs.yml").read_text(encoding="utf-8"))
    settings = re.sub(r"\b(docs_dir: |hooks: \[)docs", rf"\1{REPO}/docs", settings)
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "mkdocs.yml", "-d", "site"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "site" / "reference" / "commands.html").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f'id="{name}"' not in page] == []
