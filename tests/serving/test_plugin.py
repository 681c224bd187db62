"""The vLLM entry point: lazy, re-entrant, and declared by the package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from types import ModuleType

import pytest
from transformers import AutoConfig

from pyprune.modeling import PRUNED_MODELS
from pyprune.serving.plugin import ARCHITECTURES, look_for_platform, register


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
    for target in ARCHITECTURES.values():
        monkeypatch.delitem(sys.modules, target.partition(":")[0], raising=False)
    register()
    register()
    assert registry.models == ARCHITECTURES
    assert not {target.partition(":")[0] for target in registry.models.values()} & set(sys.modules)
    assert AutoConfig.for_model("pruned_llama").model_type == "pruned_llama"


def test_the_families_say_what_is_served() -> None:
    served = {name.removeprefix("Pruned").removesuffix("ForCausalLM") for name in ARCHITECTURES}
    assert served == {"Llama", "Mistral", "Qwen2", "Qwen3", "OPT"}
    for name, target in ARCHITECTURES.items():
        module, _, found = target.partition(":")
        assert found == name
        assert importlib.util.find_spec(module) is not None


def test_registered_names_are_those_that_checkpoints_carry() -> None:
    assert set(ARCHITECTURES) <= {cls.__name__ for cls in PRUNED_MODELS.values()}


@pytest.mark.parametrize(
    ("group", "function"), [("vllm.general_plugins", register), ("vllm.platform_plugins", look_for_platform)]
)
def test_the_package_declares_the_entry_points(group: str, function: Callable[[], None]) -> None:
    """A missing one means an installation older than pyproject.toml: `make setup` renews it."""
    [found] = [e for e in entry_points(group=group) if e.name == "pyprune"]
    assert found.load() is function
