"""Commands on a CPU that has no products of half precision: what they multiply in, and what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.checkpoint.save import save_checkpoint
from tests._support.cli import run
from tests._support.models import tiny_model
from tests._support.products import products_seen, without_instructions
from tests._support.tokenizer import tiny_tokenizer

HELD = ("--set", "dtype=bfloat16")
TRAINING = {"steps": 2, "batch_size": 2, "micro_batch_size": 2, "warmup_steps": 0}
REPORTED = "products of bfloat16 weights are computed in float32"


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dense checkpoint in bfloat16, as most of the hub are."""
    folder = tmp_path_factory.mktemp("half") / "dense"
    save_checkpoint(
        tiny_model("llama").bfloat16(), tiny_tokenizer(), folder, plan=None, provenance={}, dtype="bfloat16"
    )
    return folder


def multiplied(*arguments: str | Path) -> tuple[set[torch.dtype], set[torch.dtype], str]:
    """Run a command: the dtypes of its products, those of linear weights at their calls, and what it printed."""
    held: set[torch.dtype] = set()

    def seen(module: torch.nn.Module, _: object) -> None:
        if isinstance(module, torch.nn.Linear):
            held.add(module.weight.dtype)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(seen)
    try:
        with products_seen() as products:
            done = run(*arguments)
    finally:
        hook.remove()
    assert done.exit_code == 0, done.output
    return products & {torch.float32, torch.bfloat16, torch.float16}, held, done.output


def pruning(half: Path, text: Path, *more: str | Path) -> list[str | Path]:
    sizes = ["--calibration", text, "--samples", "4", "--sequence-length", "16", "--ratio", "0.25"]
    return ["prune", half, *sizes, *HELD, *more]


def sets(section: str) -> list[str]:
    return [word for name, value in TRAINING.items() for word in ("--set", f"{section}.{name}={value}")]


@pytest.mark.parametrize(
    "more",
    [
        ["--method", "taylor"],
        ["--method", "taylor", "--set", "score.axes=[hidden]", "--set", "score.iterations=2"],
        ["--method", "wanda"],
        ["--method", "obs", "--set", "verify=true"],
        ["--method", "shortgpt", "--set", "cut.reconstruct=least_squares", "--set", "verify=true"],
        [
            "--method",
            "last",
            "--set",
            "stages.after=[recover]",
            "--set",
            "recover.adapters=none",
            "--set",
            "recover.train.dtype=auto",
            *sets("recover.train"),
        ],
    ],
    ids=["taylor", "taylor-hidden", "wanda", "obs", "reconstruct", "recover"],
)
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "loaded"])
def test_prune_multiplies_in_float32_with_the_weights_as_they_are(
    more: list[str], streamed: bool, half: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_instructions(monkeypatch)
    if not streamed:
        monkeypatch.setattr("pyprune.run.prune.loading_reason", lambda *_, **__: "In memory.")
    products, held, printed = multiplied(*pruning(half, text, *more, "--out", tmp_path / "out"))
    assert products == {torch.float32}
    assert held == {torch.bfloat16}
    assert printed.count(REPORTED) == 1
    assert ModelSource.of(tmp_path / "out").dtype == "bfloat16"


def test_a_dtype_that_a_command_is_given_is_obeyed(half: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_instructions(monkeypatch)
    measure = ["eval", half, "--ppl", text, "--protocol", "ppl-128"]
    products, held, printed = multiplied(*measure, "--dtype", "bfloat16")
    assert torch.bfloat16 in products
    assert held == {torch.bfloat16}
    assert "products take 6 to 14 times as long in bfloat16" in printed
    assert REPORTED not in printed
    products, held, printed = multiplied(*measure)
    assert products == held == {torch.float32}
    assert "as long" not in printed


def test_a_training_dtype_that_is_named_is_obeyed(
    half: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_instructions(monkeypatch)
    more = ["--method", "last", "--set", "stages.after=[recover]", *sets("recover.train")]
    named = ["--set", "recover.train.dtype=bfloat16", "--out", tmp_path / "out"]
    products, _, printed = multiplied(*pruning(half, text, *more, *named))
    assert torch.bfloat16 in products
    assert "as long in bfloat16" in printed


def test_with_the_instructions_products_are_made_in_bfloat16(
    half: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyprune.runtime.products.has_products", lambda *_: True)
    products, _, printed = multiplied(*pruning(half, text, "--method", "taylor", "--dry-run"))
    assert torch.bfloat16 in products
    assert REPORTED not in printed


def test_float16_is_treated_alike(half: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_instructions(monkeypatch)
    arguments = pruning(half, text, "--method", "taylor", "--out", tmp_path / "out")
    arguments[arguments.index(HELD[1])] = "dtype=float16"
    products, held, printed = multiplied(*arguments)
    assert products == {torch.float32}
    assert held == {torch.float16}
    assert "products of float16 weights are computed in float32" in printed
    assert next(load_model(tmp_path / "out")[0].parameters()).isfinite().all()
