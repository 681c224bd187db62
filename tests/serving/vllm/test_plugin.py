"""The vLLM entry point: lazy, re-entrant, and declared by the package."""

from __future__ import annotations

import importlib.util
import os
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
from pyprune.families import family_for, family_of_type
from pyprune.families.engines import inferred_architectures
from pyprune.modeling import PRUNED_MODELS
from pyprune.serving.export import export
from pyprune.serving.vllm.command import serve_command
from pyprune.serving.vllm.plugin import architectures, look_for_platform, register
from tests._support.models import tiny_batch, tiny_model
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
    monkeypatch.setenv("PYPRUNE_SERVER", "this test")  # or it would stay for the tests that follow
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


@pytest.fixture
def without_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if LLaMA were of a package that brings no layer for vLLM."""
    known = {name: target for name, target in architectures().items() if name != "PrunedLlamaForCausalLM"}
    monkeypatch.setattr("pyprune.serving.vllm.limits.architectures", lambda: known)


@pytest.mark.usefixtures("without_llama")
def test_equal_sizes_are_exported_to_the_class_that_vllm_has_itself(tmp_path: Path) -> None:
    model = tiny_model("llama")
    plan = axis_plans(family_for(model).plan(model.config))["heads"]
    dense = type(model).__name__
    compact_(model, plan)
    written = export(model, tmp_path / "out", plan=plan)
    assert (written.architecture, written.stock, written.reasons) == (dense, True, ())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(loaded(tiny_batch()).logits, model(tiny_batch()).logits)


@pytest.mark.usefixtures("without_llama")
def test_sizes_per_layer_that_vllm_cannot_serve_are_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    model = tiny_model("llama")
    plan = axis_plans(family_for(model).plan(model.config))["unequal"]
    compact_(model, plan)
    with pytest.raises(ConfigError, match="widths differ between layers"):
        export(model, tmp_path / "stock", plan=plan, target="stock")
    written = export(model, tmp_path / "out", plan=plan)
    reason = f"{written.architecture} loads in Transformers, and the vLLM plugin does not serve it"
    assert any(reason in warning for warning in written.warnings)
    with pytest.raises(CheckpointError, match=reason):
        serve_command(tmp_path / "out")


def test_registered_names_are_those_that_checkpoints_carry() -> None:
    inferred = inferred_architectures()
    assert set(architectures()) - {*inferred} <= {cls.__name__ for cls in PRUNED_MODELS.values()}
    assert inferred == {family_of_type(name).pruned_model: name for name in inferred.values()}


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

    monkeypatch.setattr("pyprune.serving.vllm.plugin.register_architectures", fail)
    register()
    [record] = caplog.records
    message = record.getMessage()
    assert record.levelname == "ERROR"
    assert "\n" not in message
    assert type(error).__name__ in message
    assert "Other models are not affected" in message
    assert "transformers 5" in message


REGISTERED = """
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

models = {}
fake = ModuleType("vllm")
fake.__spec__ = ModuleSpec("vllm", None)
fake.ModelRegistry = SimpleNamespace(get_supported_archs=lambda: models, register_model=models.__setitem__)
sys.modules["vllm"] = fake
from pyprune.serving.vllm.plugin import register
register()
assert "PrunedLlamaForCausalLM" in models
"""
UNUSED = """
stock = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
stock.remove("transformers.models.auto.modeling_auto")  # names of classes, which vLLM imports itself
ours = [name for name in sys.modules if name.startswith(("pyprune.modeling.models", "pyprune.modeling.layers"))]
assert not stock + ours, stock + ours
from transformers import AutoConfig
config = AutoConfig.for_model("pruned_llama")
assert "pyprune.modeling.models" not in sys.modules
"""
USED = """
from transformers import AutoModelForCausalLM
import pyprune.modeling
sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8, "num_attention_heads": 2}
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("pruned_llama", **sizes, head_dim=16))
assert type(model) is pyprune.modeling.PrunedLlamaForCausalLM is pyprune.modeling.PRUNED_MODELS["llama"]
"""


def run_code(code: str, **environment: str) -> None:
    """Run a program in a new process, where nothing is imported yet."""
    variables = {**os.environ, **environment}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.second
def test_registering_imports_no_model_class_until_one_is_built() -> None:
    """Stock models of all families take most of a second, in each of vLLM's processes and whatever it serves."""
    run_code(REGISTERED + UNUSED + USED)


LOADED = """
import sys
from transformers import AutoModelForCausalLM
import pyprune.modeling
assert "pyprune.modeling.models" not in sys.modules
for _ in range(2):  # the second time the Auto class has the model itself
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    assert type(model).__name__ == "PrunedLlamaForCausalLM", type(model)
    assert AutoModelForCausalLM._model_mapping[type(model.config)] is type(model)
"""


@pytest.mark.second
def test_plain_transformers_loads_a_checkpoint_after_the_import(tmp_path: Path) -> None:
    model = tiny_model("llama")
    compact_(model, axis_plans(family_for(model).plan(model.config))["unequal"])
    model.save_pretrained(tmp_path / "m")
    run_code(LOADED.replace("sys.argv[1]", repr(str(tmp_path / "m"))))


TOKEN = """
import os
first = os.environ["PYPRUNE_SERVER"]
assert len(first) > 16
register()
assert os.environ["PYPRUNE_SERVER"] == first
"""


@pytest.mark.second
def test_processes_that_a_server_starts_know_that_they_belong_together() -> None:
    """The first process registers before it starts the others, which inherit its environment."""
    run_code(REGISTERED + TOKEN, PYPRUNE_SERVER="")


def test_importing_the_plugin_imports_no_model_code() -> None:
    """vLLM imports it in every process, whatever it serves."""
    code = (
        "import sys, pyprune.serving.vllm.plugin; "
        "heavy = ('torch', 'transformers', 'vllm', 'pyprune.families', 'pyprune.modeling'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
