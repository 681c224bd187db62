"""The vLLM entry point: lazy, re-entrant, and declared by the package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pyprune.cut.compact import compact_
from pyprune.errors import CheckpointError, ConfigError
from pyprune.families import all_families, family_for
from pyprune.modeling import PRUNED_MODELS
from pyprune.serving.export import export, serve_command
from pyprune.serving.plugin import architectures, look_for_platform, register
from tests._support.models import TINY, one_of_each, tiny_batch, tiny_model
from tests._support.plans import axis_plans


class FakeRegistry:
    """Remembers what was registered; a second registration of a name fails, as a warning would go unseen."""

    def __init__(self) -> None:
        self.models: dict[str, str] = {}

    def get_supported_archs(self) -> set[str]:
        return set(self.models)

    def register_model(self, name: str, target: str) -> None:
        assert name not in self.models
        self.models[name] = target


def test_registration_is_lazy_and_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = FakeRegistry()
    fake = ModuleType("vllm")
    fake.ModelRegistry = registry  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    for target in architectures().values():
        monkeypatch.delitem(sys.modules, target.partition(":")[0], raising=False)
    register()
    register()
    assert registry.models == architectures()
    assert not {target.partition(":")[0] for target in registry.models.values()} & set(sys.modules)
    assert AutoConfig.for_model("pruned_llama").model_type == "pruned_llama"


def test_the_families_say_what_is_served() -> None:
    served = {name.removeprefix("Pruned").removesuffix("ForCausalLM") for name in architectures()}
    assert served >= {"Llama", "Mistral", "Qwen2", "Qwen3", "OPT"}
    for name, target in architectures().items():
        module, _, found = target.partition(":")
        assert found == name
        assert importlib.util.find_spec(module) is not None


NOT_SERVED_PER_LAYER = [name for name in one_of_each() if not all_families()[TINY[name][0]].served_by]


@pytest.mark.parametrize("name", NOT_SERVED_PER_LAYER)
def test_equal_sizes_are_exported_to_the_class_that_vllm_has_itself(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    plan = axis_plans(family_for(model).plan(model.config))["heads"]
    dense = type(model).__name__
    compact_(model, plan)
    written = export(model, tmp_path / "out", plan=plan)
    assert (written.architecture, written.stock, written.reasons) == (dense, True, ())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(loaded(tiny_batch()).logits, model(tiny_batch()).logits)


@pytest.mark.parametrize("name", NOT_SERVED_PER_LAYER)
def test_sizes_per_layer_that_vllm_cannot_serve_are_refused_before_it_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyprune.serving.export.vllm_installed", lambda: True)
    model = tiny_model(name)
    plan = axis_plans(family_for(model).plan(model.config))["unequal"]
    compact_(model, plan)
    with pytest.raises(ConfigError, match="widths differ between layers"):
        export(model, tmp_path / "stock", plan=plan, target="stock")
    written = export(model, tmp_path / "out", plan=plan)
    assert any("the vLLM plugin serves PrunedLlama" in warning for warning in written.warnings)
    with pytest.raises(CheckpointError, match=f"{written.architecture}, which the vLLM plugin does not serve"):
        serve_command(tmp_path / "out")


def test_registered_names_are_those_that_checkpoints_carry() -> None:
    assert set(architectures()) <= {cls.__name__ for cls in PRUNED_MODELS.values()}


@pytest.mark.parametrize(
    ("group", "function"), [("vllm.general_plugins", register), ("vllm.platform_plugins", look_for_platform)]
)
def test_the_package_declares_the_entry_points(group: str, function: Callable[[], None]) -> None:
    """A missing one means an installation older than pyproject.toml: `make setup` renews it."""
    [found] = [e for e in entry_points(group=group) if e.name == "pyprune"]
    assert found.load() is function


@pytest.mark.parametrize("error", [ImportError("cannot import name 'X'\nfrom 'y'"), RuntimeError("no")])
def test_what_goes_wrong_in_a_plugin_is_one_line_in_the_log(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM calls it whatever it serves, and would end with it."""

    def fail() -> dict[str, str]:
        raise error

    monkeypatch.setattr("pyprune.serving.plugin._register", fail)
    register()
    [record] = caplog.records
    message = record.getMessage()
    assert record.levelname == "ERROR"
    assert "\n" not in message
    assert type(error).__name__ in message
    assert "Other models are not affected" in message
    assert "transformers 5" in message


def test_importing_the_plugin_imports_no_model_code() -> None:
    """vLLM imports it in every process, whatever it serves."""
    code = (
        "import sys, pyprune.serving.plugin; "
        "heavy = ('torch', 'transformers', 'vllm', 'pyprune.families', 'pyprune.modeling'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
