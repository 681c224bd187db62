"""Where families come from: this package's folder, and packages that bring some by an entry point."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyprune.errors import UnsupportedModelError
from pyprune.families import all_families, resolve
from tests._support.paths import REPO

CONFIGURATION = """
from transformers import AutoConfig, LlamaConfig

class ElsewhereConfig(LlamaConfig):
    model_type = "elsewhere"

AutoConfig.register("elsewhere", ElsewhereConfig, exist_ok=True)
"""
MODELLING = """
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from elsewhere.configuration import ElsewhereConfig

class ElsewhereDecoderLayer(LlamaDecoderLayer):
    pass

class ElsewhereForCausalLM(LlamaForCausalLM):
    config_class = ElsewhereConfig

AutoModelForCausalLM.register(ElsewhereConfig, ElsewhereForCausalLM, exist_ok=True)
"""
FAMILY = """
from pyprune.families import Family, Row, StockClasses, StockTarget, common
from pyprune.families.common import decoder_rows, first_obstacle, heads_obstacle, output_bias_obstacle, width_obstacle

obstacle = first_obstacle(output_bias_obstacle("Elsewhere"), width_obstacle, heads_obstacle)

FAMILIES = (
    Family(
        model_type="elsewhere",
        classes=StockClasses(
            config="elsewhere.configuration:ElsewhereConfig",
            model="elsewhere.modelling:ElsewhereForCausalLM",
            layer="elsewhere.modelling:ElsewhereDecoderLayer",
        ),
        rows=decoder_rows(),
        stock_targets=(StockTarget("elsewhere", obstacle),),
    ),
)
"""
FUSED_ROWS = """(
            common.EMBEDDING,
            *common.norm_rows(common.LAYER + "input_layernorm", "pre_norm", "attention"),
            Row("model.layers.{i}.self_attn.qkv_proj.weight",
                (("heads", "kv_heads", "kv_heads"), "hidden"), "reader", "attention"),
            *common.output_rows(common.LAYER + "self_attn.o_proj", "heads", "attention"),
            *common.norm_rows(common.LAYER + "post_attention_layernorm", "pre_norm", "mlp"),
            Row("model.layers.{i}.mlp.gate_up_proj.weight", (("ffn", "ffn"), "hidden"), "reader", "mlp"),
            *common.output_rows(common.LAYER + "mlp.down_proj", "ffn", "mlp"),
            *common.norm_rows("model.norm", "final_norm"),
            common.HEAD,
        )"""
TINY = """
from tests._support.models import TINY

TINY["elsewhere"] = ("elsewhere", {"num_key_value_heads": 2})
"""
PICKLED = """
import pickle, pyprune.modeling
from pyprune.modeling import PrunedElsewhereConfig, PrunedElsewhereForCausalLM
for cls in (PrunedElsewhereConfig, PrunedElsewhereForCausalLM):
    assert pickle.loads(pickle.dumps(cls)) is cls
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path that stands for site-packages; the families are found again before and after."""
    monkeypatch.syspath_prepend(str(tmp_path))
    all_families.cache_clear()
    yield tmp_path
    all_families.cache_clear()


def package(site: Path, name: str, family: str, **modules: str) -> None:
    """Write a package with its metadata, as an installer leaves it."""
    for module, text in {"__init__": "", "family": family, **modules}.items():
        path = site / name / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[pyprune.families]\n{name} = {name}.family\n")


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{REPO}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=280)


def like_phi3(text: str) -> str:
    """The same package on top of Phi-3, whose projections are fused."""
    renamed = text.replace("models.llama.modeling_llama", "models.phi3.modeling_phi3").replace("Llama", "Phi3")
    return renamed.replace("decoder_rows(),", f"{FUSED_ROWS},")


@pytest.mark.process
@pytest.mark.second
@pytest.mark.parametrize("made", [str, like_phi3])
def test_a_family_from_outside_the_tree_passes_the_contract(tmp_path: Path, made: Callable[[str], str]) -> None:
    """Masked equals compacted on every axis, also after save and load, stock or pruned, as every family here does."""
    modules = {"configuration": made(CONFIGURATION), "modelling": made(MODELLING), "tiny_of_elsewhere": TINY}
    package(tmp_path, "elsewhere", made(FAMILY), **modules)
    options = ["-q", "-p", "elsewhere.tiny_of_elsewhere", "-p", "no:cacheprovider", "-k", "elsewhere"]
    ran = python(tmp_path, "-m", "pytest", *options, "tests/families/test_contract.py", "tests/cut/test_compensate.py")
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    found = re.search(r"(\d+) passed", ran.stdout)
    assert found is not None
    assert int(found[1]) >= 22
    pickled = python(tmp_path, "-c", PICKLED)
    assert pickled.returncode == 0, pickled.stderr


def test_two_families_of_one_model_type_are_refused(install: Path) -> None:
    package(install, "twice", FAMILY.replace('model_type="elsewhere"', 'model_type="opt"'))
    with pytest.raises(UnsupportedModelError, match=r"'opt': pyprune\.families\.opt and the entry point 'twice'"):
        all_families()


def test_two_families_with_one_pruned_class_are_refused(install: Path) -> None:
    package(install, "same", FAMILY.replace("elsewhere.modelling:Elsewhere", "transformers:Llama"))
    with pytest.raises(UnsupportedModelError, match=r"'PrunedLlamaForCausalLM': .*llama and the entry point 'same'"):
        all_families()


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("FAMILIES = 3", "has FAMILIES = 3; it must be a tuple"),
        ("FAMILIES = ('llama',)", "must be a tuple"),
        ("import no_such_module_of_anybody", "cannot be loaded: .*no_such_module_of_anybody"),
        ("1 / 0", "cannot be loaded: .*Repair or uninstall"),
        ("", "cannot be loaded: .*FAMILIES"),
    ],
    ids=["number", "strings", "import", "raises", "nothing"],
)
def test_a_broken_package_is_named(install: Path, family: str, words: str, request: pytest.FixtureRequest) -> None:
    name = f"broken_{request.node.callspec.id}"
    package(install, name, family)
    with pytest.raises(UnsupportedModelError, match=f"The entry point '{name}' .*{words}"):
        all_families()


@pytest.mark.parametrize("path", ["transformers:NoSuchConfig", "no_such_module_of_anybody:Config", "transformers", ":"])
def test_a_class_that_does_not_exist_is_named(path: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"names '{path}', which cannot be imported"):
        resolve(path)


@pytest.mark.process
def test_families_are_found_without_torch() -> None:
    code = "import sys; from pyprune.families import all_families; all_families(); assert 'torch' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_the_pruned_classes_exist_by_name_where_checkpoints_and_pickles_look() -> None:
    import pyprune.modeling
    from pyprune.modeling import PRUNED_CONFIGS, PRUNED_MODELS, configuration, models

    for classes, module in ((PRUNED_CONFIGS, configuration), (PRUNED_MODELS, models)):
        assert list(classes) == list(all_families())
        for cls in classes.values():
            assert getattr(pyprune.modeling, cls.__name__) is getattr(module, cls.__name__) is cls
            assert pickle.loads(pickle.dumps(cls)) is cls
    for name in ("PrunedLlamaConfig", "PrunedGemma3TextConfig", "PrunedOPTConfig"):
        assert getattr(configuration, name).__name__ == name
    for name in ("PrunedLlamaForCausalLM", "PrunedGemma3ForCausalLM", "PrunedOPTForCausalLM"):
        assert getattr(models, name).__name__ == name
