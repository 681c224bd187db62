"""Text towers of multimodal checkpoints: each becomes a separate causal LM, and is put back after a cut."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMultimodalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from pyprune.errors import UnsupportedModelError, shown
from pyprune.families import parameter_shapes
from pyprune.families.base import cut_axes
from pyprune.families.infer import plain_values
from pyprune.families.prefix import dense_type, is_pruned_type
from pyprune.modeling.configuration import TOWER
from pyprune.modeling.shapes import uninitialised_model
from pyprune.plan import HEAD_DIM, PrunePlan

TWINS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Type of a tower that is no causal LM -> the type that computes the same from text, whose positions are one number."""
WIDE_INSIDE = ("internvl", "llava", "mistral3")
"""Types whose class makes the projector as wide inside as the stream: two matrices, :data:`FIRST` and :data:`LAST`."""
FIRST, LAST = "multi_modal_projector.linear_1.", "multi_modal_projector.linear_2."
"""Parts of the names of these matrices."""
WIDTHS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gemma3", "gemma4", "idefics3", "smolvlm", *WIDE_INSIDE), ()),
    "paligemma": ("projection_dim", "vision_config.projection_dim"),
    "qwen2_vl": ("vision_config.hidden_size",),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"), ("vision_config.out_hidden_size",)),
}
"""Type whose projector writes the stream with its last matrix, which is cut with it -> the fields of its configuration,
besides the tower's, that hold its width."""
ERROR = 2e-2
"""Largest relative difference of logits that rounding explains, also in bfloat16."""


def has_tower(values: Mapping[str, Any]) -> bool:
    """Check whether a config.json (plain data) describes a multimodal model with a text tower."""
    kind = dense_type(values.get("model_type"))  # a damaged one may be a list
    return isinstance(values.get("text_config"), Mapping) and kind in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES


def text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json (plain data) that describes the causal LM: all of it, or that of its tower."""
    if not has_tower(values):
        return values
    if isinstance(pruned := values.get(TOWER), Mapping):
        return pruned
    text = values["text_config"]
    kind = text.get("model_type")
    return {**text, "model_type": TWINS.get(str(kind), kind)}


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a multimodal model's text tower as a causal LM.

    Args:
        config: it is not changed.
    """
    if pruned := getattr(config, TOWER, None):
        return cast(PretrainedConfig, copy.deepcopy(pruned))
    text = copy.deepcopy(config.text_config)
    if twin := TWINS.get(text.model_type):
        values = plain_values(text)
        rope = {key: value for key, value in values["rope_parameters"].items() if not key.startswith("mrope")}
        values["rope_parameters"] = rope | ({"rope_type": "default"} if rope.get("rope_type") == "mrope" else {})
        always = {"norm_topk_prob": True} if twin == "qwen3_moe" else {}
        text = AutoConfig.for_model(twin, **values | always)
    text.tie_word_embeddings = config.tie_word_embeddings
    return text  # type: ignore[no-any-return]


def closed_axes(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the axes that the multimodal class closes, with the reason for each; {} for other models.

    Args:
        values: config.json as plain data.
    """
    if not has_tower(values):
        return {}
    name = values["model_type"]
    if name in WIDTHS:
        return {}
    return {"hidden": f"pyprune knows no cut of the projector of {name!r} models, which writes its channels"}


def count_first_layers(config: PretrainedConfig) -> int:
    """Return after how many layers of a tower features of images are added, by the configuration of the whole model."""
    vision = getattr(config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def tower_of(model: PreTrainedModel) -> Tower | None:
    """Return the tower that a causal LM belongs to, also after it was cut; None for any other model."""
    return getattr(model, "tower", None)


def whole_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model that a checkpoint holds: the multimodal one of a text tower, else ``model`` itself."""
    tower = tower_of(model)
    return model if tower is None else tower.whole(model)


def text_model(whole: PreTrainedModel) -> PreTrainedModel:
    """Make the text tower of a multimodal model a causal LM, whose parameters share the memory of the whole one.

    Raises:
        UnsupportedModelError: its parameters are others, or it computes another text.
    """
    config = text_config(whole.config)
    text = uninitialised_model(config, whole.dtype)
    names = _names_in_whole(text, whole)
    state = whole.state_dict()
    text.load_state_dict({own: state[name] for own, name in names.items()}, assign=True)
    text.tie_weights()
    _check_same_text(whole.eval(), text.eval())
    rest = {name: tensor for name, tensor in state.items() if name not in set(names.values())}
    conversions = getattr(whole, "_weight_conversions", None)
    text.generation_config = copy.deepcopy(whole.generation_config)
    text.name_or_path = whole.name_or_path
    base = f"{text.base_model_prefix}."
    heads = {own: name for own, name in names.items() if not own.startswith(base)}
    own, name = next((own, name) for own, name in names.items() if own not in heads)
    prefix = name.removesuffix(own.removeprefix(base))
    cast(Any, text).tower = Tower(whole.config, config, base, prefix, heads, rest, conversions)
    return text


@dataclass(frozen=True, eq=False)
class Tower:
    """The multimodal model that a text tower was taken from, without the tower's own weights.

    Attributes:
        config: of the whole dense model.
        dense: of the dense tower as a causal LM.
        base: start of the names in the tower.
        prefix: start of the same names in the whole model.
        heads: other names in the tower -> their names in the whole model.
        rest: all tensors outside the tower, by name.
        conversions: rules by which Transformers writes the names of files.
    """

    config: PretrainedConfig
    dense: PretrainedConfig
    base: str
    prefix: str
    heads: Mapping[str, str]
    rest: Mapping[str, Tensor]
    conversions: Any

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # nothing changes it

    def closed_axes(self) -> dict[str, str]:
        """Return the axes that no plan may cut, with the reason for each."""
        return closed_axes(self.config.to_dict())

    def cut(self, config: PretrainedConfig, hidden: Sequence[int], factor: float) -> Self:
        """Return the tower with a projector that writes the kept channels of the stream alone.

        Args:
            config: of the cut tower.
            hidden: the kept channels, ascending.
            factor: of the cut on the stream.
        """
        rest = dict(self.rest)
        for name, positions in self.kept_positions(config, hidden).items():
            for dim, kept in positions.items():
                rest[name] = rest[name].index_select(dim, kept.to(rest[name].device))
            if FIRST not in name:  # the inside of a projector is no part of the stream
                rest[name] = rest[name] * factor
        return replace(self, rest=rest)

    def kept_positions(self, config: PretrainedConfig, hidden: Sequence[int]) -> dict[str, dict[int, Tensor]]:
        """Return the tensors around the tower that a cut of the stream makes smaller: name -> dimension -> positions.

        Inside a projector that is as wide as the stream, the channels with the smallest weights are removed.

        Args:
            config: of the cut tower.
            hidden: the kept channels, ascending.
        """
        shapes = self._shapes(config)
        stream, inner = torch.tensor(hidden), self._inner_channels(hidden)
        kept: dict[str, dict[int, Tensor]] = {}
        for name, tensor in self.rest.items():
            for dim in (dim for dim, size in enumerate(shapes[name]) if size != tensor.shape[dim]):
                inside = inner is not None and (FIRST in name or (LAST in name and dim == 1))
                kept.setdefault(name, {})[dim] = cast(Tensor, inner) if inside else stream
        return kept

    def notes(self, plan: PrunePlan) -> list[str]:
        """Return a sentence if a plan also removes channels inside the projector."""
        count = len(plan.removed_hidden)
        if not count or not any(FIRST in name for name in self.rest):
            return []
        return [
            f"The projector of images is as wide inside as the stream: its {count} inner channels with the smallest "
            "weights are removed too."
        ]

    def _inner_channels(self, hidden: Sequence[int]) -> Tensor | None:
        """Return the channels to keep inside a projector that is as wide as the stream; None for any other."""
        weights = {name: tensor for name, tensor in self.rest.items() if name.endswith(".weight")}
        first = next((weight for name, weight in weights.items() if FIRST in name), None)
        if first is None:
            return None
        last = next(weight for name, weight in weights.items() if LAST in name)
        strength = first.float().norm(dim=1) * last[torch.tensor(hidden)].float().norm(dim=0)
        return cast(Tensor, strength.cpu().argsort(descending=True, stable=True)[: len(hidden)].sort().values)

    def whole(self, text: PreTrainedModel) -> PreTrainedModel:
        """Make the multimodal model around a tower, dense or cut; it shares the tower's parameters."""
        model = self._around(text.config, text.dtype)
        state = dict(self.rest) | {self._name(own): tensor for own, tensor in text.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model.tie_weights()
        model.generation_config = copy.deepcopy(text.generation_config or GenerationConfig())
        if self.conversions is not None and not is_pruned_type(text.config.model_type):
            model._weight_conversions = self.conversions
        return model.eval()  # type: ignore[no-any-return]

    def class_name(self, *, stock: bool) -> str:
        """Return the name of the multimodal class around the tower, dense or cut."""
        architectures = self.config.architectures or [self.config.model_type]
        name = str(architectures[0]).removeprefix("Pruned")
        return name if stock else f"Pruned{name}"

    @property
    def first_layers(self) -> int:
        """Return how many layers must be kept: features of images are added after each of them."""
        return count_first_layers(self.config)

    def obstacle(self, plan: PrunePlan) -> str | None:
        """Return why no multimodal class can hold the tower after a plan, or None."""
        if reasons := [reason for axis, reason in self.closed_axes().items() if axis in cut_axes(plan)]:
            return reasons[0]
        first = self.first_layers
        if any(index < first for index in plan.removed_layers):
            return f"features of images are added after each of its first {first} layers, which must be kept"
        return None

    def class_obstacle(self, config: PretrainedConfig) -> str | None:
        """Return why the multimodal class cannot hold the tower after a cut, or None.

        Args:
            config: of the cut tower.
        """
        other = not is_pruned_type(config.model_type) and config.model_type != self.dense.model_type
        if other and self.config.text_config.model_type in TWINS:
            return f"it has no place for sizes that only the architecture {config.model_type!r} takes"
        with torch.device("meta"):
            text = uninitialised_model(config, torch.float32)
        try:
            shapes = self._shapes(config)
        except Exception as error:  # code of many classes: it can raise anything
            return f"its class refuses these sizes ({shown(error)})"
        expected = {self._name(own): shape for own, shape in parameter_shapes(text).items()}
        wrong = next((name for name in expected if shapes.get(name) != expected[name]), None)
        return f"its class builds {wrong} in other sizes" if wrong else None

    def _shapes(self, config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every tensor of the multimodal model around a tower with this configuration."""
        with torch.device("meta"):
            state = self._around(config, torch.float32).state_dict()
        return {name: tuple(tensor.shape) for name, tensor in state.items()}

    def _name(self, own: str) -> str:
        """Return the name in the whole model of a parameter of the tower."""
        return self.prefix + own.removeprefix(self.base) if own.startswith(self.base) else self.heads[own]

    def _around(self, text: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """Build the multimodal model around a tower with this configuration, without writing weights."""
        config = copy.deepcopy(self.config)
        for name in config.sub_configs:
            if (part := getattr(config, name, None)) is not None:
                part.dtype = None
        if self.config.text_config.model_type in TWINS or is_pruned_type(text.model_type):
            _change(config.text_config, self.dense, text)
        else:
            config.text_config = copy.deepcopy(text)
        config.tie_word_embeddings = text.tie_word_embeddings
        for field in WIDTHS.get(config.model_type, ()):
            part, _, name = field.rpartition(".")
            setattr(getattr(config, part) if part else config, name, text.hidden_size)
        if is_pruned_type(text.model_type):
            from pyprune.modeling.towers import pruned_tower_class

            made = pruned_tower_class(dense_type(config.model_type))
            config = made(**{**plain_values(config), TOWER: text.to_dict()})
        return uninitialised_model(config, dtype, auto=AutoModelForMultimodalLM)


def _change(config: PretrainedConfig, before: PretrainedConfig, after: PretrainedConfig) -> None:
    """Give a configuration the values that differ between two others; if pruned, also the channels of a head, on which
    positions depend.
    """
    old = before.to_dict()
    for name, value in plain_values(after).items():
        changed = old.get(name) != value and hasattr(config, name) and name != "per_layer_config"
        if changed or (name == HEAD_DIM and is_pruned_type(after.model_type)):
            setattr(config, name, value)


def _names_in_whole(text: PreTrainedModel, whole: PreTrainedModel) -> dict[str, str]:
    """Return the name in the multimodal model of every tensor of its tower.

    Raises:
        UnsupportedModelError: they cannot be found, or its tower has others.
    """
    names = find_names(text.state_dict(), text.base_model_prefix, whole.state_dict())
    if names is None:
        raise UnsupportedModelError(
            f"The text part of this {whole.config.model_type!r} model is not a {text.config.model_type!r} model: it "
            "has other parameters. Nothing can be removed from it."
        )
    return names


def find_names(names: Collection[str], base: str, stored: Collection[str]) -> dict[str, str] | None:
    """Find the tensors of a tower among those of a multimodal model.

    Args:
        names: of all tensors of the tower as a causal LM.
        base: of these names, the first part inside the decoder.
        stored: names in the multimodal model, or in its files.

    Returns:
        Name in the causal LM -> name in the multimodal model; None where its tower has other tensors.
    """
    base += "."
    inner = [name.removeprefix(base) for name in names if name.startswith(base)]
    starts = {name.removesuffix(inner[0]) for name in stored if name.endswith("." + inner[0])}
    starts = {start for start in starts if {*inner} == {n.removeprefix(start) for n in stored if n.startswith(start)}}
    outer = [name for name in names if not name.startswith(base)]
    heads = {own: [name for name in stored if name == own or name.endswith("." + own)] for own in outer}
    if len(starts) != 1 or any(len(found) != 1 for found in heads.values()):
        return None
    start = starts.pop()
    return {base + name: start + name for name in inner} | {own: found[0] for own, found in heads.items()}


@torch.no_grad()
def _check_same_text(whole: PreTrainedModel, text: PreTrainedModel) -> None:
    """Refuse a tower that does not compute the multimodal model's logits of a few tokens without an image."""
    ids = torch.arange(3, 11)[None] % text.config.vocab_size
    expected, logits = (model(input_ids=ids, use_cache=False).logits.float() for model in (whole, text))
    error = float((logits - expected).norm() / expected.norm())
    if not error < ERROR:
        raise UnsupportedModelError(
            f"The text part of this {whole.config.model_type!r} model computes other logits than a "
            f"{text.config.model_type!r} model of its weights ({error:.2%}). Nothing can be removed from it."
        )
