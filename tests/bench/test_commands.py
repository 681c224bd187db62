"""Every bench command explains its options: `--help` formats all of its help texts, which nothing else does."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import bench

COMMANDS = sorted(
    f"{file.parent.name}.{file.stem}"
    for file in Path(bench.__path__[0]).glob("*/*.py")
    if 'if __name__ == "__main__"' in file.read_text() and not file.stem.endswith(("_child", "_parts"))
)


def test_commands_are_found() -> None:
    assert {"fit.fit", "kernels.ops", "serving.serving_card"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = importlib.import_module(f"bench.{name}")
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    assert stopped.value.code == 0
    assert "options:" in capsys.readouterr().out
