"""Quality against speed of several checkpoints, and the page as a real browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pyprune.checkpoint.save import save_checkpoint
from pyprune.cli.bench import short_names
from pyprune.runtime.charts import PointChart, pareto_front
from pyprune.runtime.report import Report, write_report
from pyprune.serving.speed.results import COLUMNS, MeasuredModel, Sample, SpeedReport, Workload
from tests._support.cli import refused, run
from tests._support.models import tiny_model
from tests._support.quantised import WIDE, write_pair
from tests._support.served import SIZES, uniform
from tests._support.tokenizer import tiny_tokenizer

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1200,2600",
)  # fmt: skip
SMALL = ("--engine", "transformers", "--dtype", "float32", "--batch-size", "2", "--new-tokens", "2",
         "--prompt-tokens", "8", "--repeats", "1", "--precision", "0")  # fmt: skip
ACCENT = (0x1F, 0x6F, 0xB2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DIR/report: a dense model, a pruned one, the same in int8, and one that nobody would take."""
    pytest.importorskip("compressed_tensors")
    root = tmp_path_factory.mktemp("tradeoff")
    sizes = {**SIZES, "intermediate_size": WIDE}
    save_checkpoint(tiny_model("llama", **sizes), tiny_tokenizer(), root / "big", plan=None, provenance={})
    save_checkpoint(tiny_model("llama", seed=5, **sizes), tiny_tokenizer(), root / "other", plan=None, provenance={})
    write_pair(root, "llama", uniform(96), "w8a8-int8")
    (root / "text.txt").write_text("the thing in the garden, " * 40, encoding="utf-8")
    result = run(
        "bench", root / "plain", root / "quantised", root / "other", "--against", root / "big", *SMALL,
        "--ppl", root / "text.txt", "--protocol", "ppl-128", "--report", root / "report", "--json", root / "a.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return root


MODELS = ("dense", "plain", "quantised", "other")


@pytest.mark.second
@pytest.mark.second  # for the engines of four models
def test_every_checkpoint_is_in_the_tables_and_the_figures(folder: Path) -> None:
    text = (folder / "report" / "report.md").read_text(encoding="utf-8")
    data = json.loads((folder / "a.json").read_text())
    assert tuple(data["perplexity"]) == tuple(data["summary"]) == MODELS
    for name in MODELS:
        assert f"| {name} |" in text
    assert "## Quality against speed" in text
    assert "text.txt, ppl-128" in text
    fastest = max(MODELS, key=lambda name: data["summary"][name]["tokens_per_second"]["median"])
    best = min(MODELS, key=lambda name: data["perplexity"][name])
    rows = re.findall(r"^\| (\w+) \| [^|]+ \| [^|]+ \| (yes|no) \|", text, flags=re.MULTILINE)
    unbeaten = [name for name, is_unbeaten in rows if is_unbeaten == "yes"]
    assert {fastest, best} <= set(unbeaten)
    assert len(rows) == len(MODELS)


@pytest.mark.second
def test_a_report_is_replaced_only_when_asked(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["bench", folder / "plain", "--against", folder / "big", *SMALL]
    quality = ["--ppl", folder / "text.txt", "--protocol", "ppl-128"]
    assert "exists already" in refused(*command, *quality, "--report", folder / "report")
    assert "so it needs --ppl" in refused(*command, "--report", tmp_path / "new")
    shutil.copytree(folder / "report", tmp_path / "report")
    monkeypatch.setattr("pyprune.serving.speed.measure.measure", lambda *_, **__: timings())
    monkeypatch.setattr("pyprune.cli.bench.loaded_perplexity", lambda *_, **__: 7.5)
    result = run(*command, *quality, "--report", tmp_path / "report", "--overwrite")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "| pruned | 7.50 | 125.0 | yes |" in text
    assert "quantised" not in text


def timings() -> SpeedReport:
    """Two models, of which the second takes 0.8 of the time."""
    samples = [
        Sample(name, column, 0, 0, seconds, 1000)
        for name, seconds in (("dense", 10.0), ("pruned", 8.0))
        for column in COLUMNS
    ]
    models = {name: MeasuredModel(f"/m/{name}", "LlamaForCausalLM", 1000, 2000) for name in ("dense", "pruned")}
    environment = {"device": "a CPU", "cpus": 2, "versions": {"transformers": "5.19.0"}}
    return SpeedReport("transformers", None, Workload(), models, tuple(samples), environment)


def test_names_are_short_and_never_the_same() -> None:
    assert short_names(["runs/a/out"]) == {"pruned": "runs/a/out"}
    paths = ["a/out", "b/out", "c/dense", "out"]
    assert short_names(paths) == {"out": "a/out", "out (2)": "b/out", "dense (2)": "c/dense", "out (3)": "out"}


def test_the_front_leaves_out_what_another_beats_in_everything() -> None:
    points = {"slow": (1.0, 9.0), "fast": (3.0, 1.0), "beaten": (3.0, 2.0), "twin": (1.0, 9.0)}
    assert pareto_front(points) == ["slow", "fast", "twin"]
    assert pareto_front({}) == []


# --- a real browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a browser without a window on a page; gives what it prints."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium is installed")

    def open_page(page: Path, *options: str) -> str:
        profile = tmp_path_factory.mktemp("profile")
        command = [browser, *FLAGS, f"--user-data-dir={profile}", *options, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return open_page


@pytest.mark.second
def test_a_browser_finds_every_point(folder: Path, browse: Callable[..., str]) -> None:
    dom = browse(folder / "report" / "report.html", "--dump-dom")
    assert "<title>Quality against speed</title>" in dom
    charts = dom.split("<figure>")[1:]
    assert len(charts) == 2
    for chart in charts:
        points = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*><title>([^<:]*):', chart)
        names = [name for _, _, name in points]
        places = {(x, y) for x, y, _ in points}
        assert sorted(names) == sorted(MODELS)
        assert len(places) == len(MODELS), "each stands at a place of its own"


@pytest.mark.second
def test_a_browser_paints_the_front(browse: Callable[..., str], tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    chart = PointChart("c", "x", "y", {"a": (1.0, 9.0), "b": (5.0, 1.0)}, front=["a", "b"])
    for name, charts in (("with", (chart,)), ("without", ())):
        _, page = write_report(Report("r", charts=charts), tmp_path / name)
        browse(page, f"--screenshot={tmp_path / name}.png")
    painted = {}
    for name in ("with", "without"):
        picture = np.asarray(image.open(tmp_path / f"{name}.png").convert("RGB")).astype(int)
        painted[name] = int((abs(picture - ACCENT).max(axis=-1) <= 2).sum())
    assert painted["with"] > 100 > painted["without"] == 0, "two points and the line between them"
