"""The GGUF forms of a family: the limits of llama.cpp's architectures, and the names of parameters in the file.

A family file lists its forms in ``Family.gguf``, the first that fits is written; those of inferred types are in
``gguf_types.py``. Everything here is data about llama.cpp's architectures; :mod:`pyprune.serving.gguf` reads it and
writes the file. The package gguf names the tensors of each architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pyprune.errors import MissingDependencyError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from pyprune.families.base import Row

BLOCK = "blk.{i}."
QKV_BIASES = ("attn_q", "attn_k", "attn_v")
DECODER_BIASES = (*QKV_BIASES, "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LAYER_NORM_BIASES = ("attn_norm", "ffn_norm", "output_norm")
CORRECTIONS = ("e_score_correction_bias", "expert_bias")
"""Ends of the names of parameters and buffers that are added to the scores of experts before some are chosen."""
Change = Callable[[Any, Any], Any]
"""(values of a parameter, configuration) -> values of a tensor of the file. Knows torch tensors by their methods."""
FACTORS: Mapping[str, tuple[str, ...]] = {
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
"""Key of the file -> fields of configurations with its value."""
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
OLMO_EPSILON = 1e-5
"""The constant in OLMo's norms, of which no field tells."""


def norm_epsilon(config: Any) -> float:
    """Return the constant that the norms of a model add to the variance."""
    return float(next((getattr(config, name) for name in EPSILONS if hasattr(config, name)), OLMO_EPSILON))


@dataclass(frozen=True)
class GgufSizes:
    """The sizes of a model as a GGUF file states them.

    Attributes:
        hidden: channels of the residual stream.
        head_dim: channels of a head.
        layers: (query heads, KV heads, FFN channels) of every layer; 0 = the sub-block is skipped. Those of a mixture
            are the channels of an expert.
        tied: the head is the embedding.
        mixtures: (experts, channels of the shared experts) of every layer, (0, 0) of a dense one; () = all are dense.
        blocks: (whether it has attention, whether it has an MLP) of the kind of every layer; () = all have both.
    """

    hidden: int
    head_dim: int
    layers: tuple[tuple[int, int, int], ...]
    tied: bool
    mixtures: tuple[tuple[int, int], ...] = ()
    blocks: tuple[tuple[bool, bool], ...] = ()

    @property
    def has_blocks(self) -> tuple[tuple[bool, bool], ...]:
        """Whether each layer has attention and an MLP by its kind; a plan may skip them."""
        return self.blocks or ((True, True),) * len(self.layers)

    @property
    def are_equal(self) -> bool:
        """True if all layers have the same sizes, and all their sub-blocks; mixtures may differ from dense layers."""
        mixtures = self.mixtures or ((0, 0),) * len(self.layers)
        layers = list(zip(self.layers, mixtures, self.has_blocks, strict=True))
        heads = {layer[:2] for layer, _, (attention, _) in layers if attention}
        mlps = {(layer[2], mixture) for layer, mixture, (_, mlp) in layers if mlp}
        of_kind = [bool(experts) for _, (experts, _) in mlps]
        whole = all(map(all, heads)) and all(ffn for ffn, _ in mlps)
        return whole and len(heads) < 2 and len(of_kind) == len(set(of_kind))

    @property
    def heads(self) -> tuple[int, int]:
        """(Query heads, KV heads) of the first layer with attention."""
        return next((layer[:2] for layer in self.layers if layer[0]), (0, 0))

    @property
    def numbers_of_experts(self) -> list[int]:
        """The different numbers of experts of mixtures, the smallest first."""
        return sorted({experts for experts, _ in self.mixtures if experts})

    @property
    def dense_layers(self) -> int:
        """The number of dense layers in front of the first mixture; all of them if there is none."""
        counts = [experts for experts, _ in self.mixtures]
        return next((i for i, experts in enumerate(counts) if experts), len(self.layers))


@dataclass(frozen=True)
class GgufForm:
    """One architecture of llama.cpp that can hold models of a family.

    Attributes:
        architecture: its name, ``general.architecture``.
        biases: names (without the block) of modules that may have a bias.
        activation: of the MLP, as Transformers names it.
        per_layer: sizes may differ between layers, and sub-blocks may be missing.
        square: heads are together as wide as the stream.
        adjacent_pairs: rotary positions turn channels 2j and 2j + 1, not j and j + head_dim / 2, so rows of queries and
            keys are put in that order.
        fused_qkv: queries, keys and values are one tensor, ``attn_qkv``.
        rope_factors: the file may hold ``rope_freqs``, one factor for each rotary frequency (LLaMA 3, Gemma 4).
        yarn: positions may be scaled by YaRN.
        windows: some layers may have a sliding window; always = some must have one.
        own_head: the file holds a head, also where it is the embedding.
        normed_experts: the weights of the chosen experts are divided by their sum; None = the file says.
        dense_first: of a mixture, layers without experts are the first ones; False = any layers have experts, or none.
        gating: function of the router, as llama.cpp numbers it: 1 softmax, 2 sigmoid.
        parts: end of a parameter's name -> names of tensors, without the block, -> what they hold of it; for
            parameters that the package gguf does not name, or that the file has in another form.
        layer_keys: end of the name of a parameter or buffer -> whole key that lists its number for each layer.
        obstacle: (config, sizes) -> reason why this architecture cannot hold the model, or None.
        metadata: (config, sizes) -> keys without the architecture's name, instead of those that are
            written of every model or besides them; int, float, bool, text or a list.
    """

    architecture: str
    biases: tuple[str, ...] = QKV_BIASES
    activation: str = "silu"
    per_layer: bool = False
    square: bool = False
    adjacent_pairs: bool = False
    fused_qkv: bool = False
    rope_factors: bool = False
    yarn: bool = False
    windows: Literal["", "some", "always"] = ""
    own_head: bool = False
    normed_experts: bool | None = None
    dense_first: bool = True
    gating: Literal[1, 2] = 1
    parts: Mapping[str, Mapping[str, Change]] = field(default_factory=dict, hash=False)
    layer_keys: Mapping[str, str] = field(default_factory=dict, hash=False)
    obstacle: Callable[[PretrainedConfig, GgufSizes], str | None] = lambda config, sizes: None
    metadata: Callable[[PretrainedConfig, GgufSizes], dict[str, Any]] = field(default=lambda config, sizes: {})

    def names_of(self, row: Row) -> tuple[str, ...]:
        """Return the name patterns of the tensors that a parameter becomes; () if the architecture has none for it.

        Raises:
            MissingDependencyError: the package gguf is not installed.
        """
        if changes := self.changes_of(row.pattern):
            return tuple(changes)
        owner, _, leaf = row.pattern.rpartition(".")
        fused = any(len(axes) > 1 for axes in row.dimensions)
        kind = "bias" if row.is_bias else "weight"
        if row.pattern.endswith(CORRECTIONS):
            return self._known(BLOCK + "exp_probs_b.bias")
        if "experts" in row.axes and not owner.endswith("experts"):
            return self._known(f"{BLOCK}ffn_gate_inp.{kind}")
        shared = ("shared_ffn", "shared_ffn") in row.axes
        if "experts" in row.axes or shared:
            parts = ("gate", "up") if fused else ("down",)
            return self._known(*(f"{BLOCK}ffn_{part}_{'shexp' if shared else 'exps'}.{kind}" for part in parts))
        find = tensor_names(self.architecture)
        found = find(owner) or find(owner.replace("model.", "backbone.", 1))  # as older classes call it
        if ("ffn", "ffn") in row.axes and found is None:
            return self._known(*(f"{BLOCK}ffn_{part}.{kind}" for part in ("gate", "up")))
        if found and "ffn" in row.axes:
            found = found.removesuffix("_shexp")  # in models without experts it is the MLP
        if found is None and self.fused_qkv:
            found = tensor_names("llama")(owner)
        if found is None:  # sinks of attention are a parameter without a module
            found, leaf = tensor_names(self.architecture)(row.pattern), "weight"
        if found is None or (kind == "bias" and found.removeprefix(BLOCK) not in self.biases):
            return ()
        return (f"{found}.{leaf}",)

    def changes_of(self, pattern: str) -> dict[str, Change]:
        """Return the name patterns of :attr:`parts` that a parameter becomes, and what they hold of it."""
        found = (parts for end, parts in self.parts.items() if pattern.endswith(end))
        block = BLOCK if "{i}" in pattern else ""
        return {block + name: change for name, change in next(found, {}).items()}

    def key_of(self, pattern: str) -> str | None:
        """Return the key that holds the numbers of a parameter instead of a tensor, or None."""
        return next((key for end, key in self.layer_keys.items() if pattern.endswith(end)), None)

    def _known(self, *names: str) -> tuple[str, ...]:
        tensors = tensors_of(self.architecture)
        return names if all(name.rpartition(".")[0] in tensors for name in names) else ()


@cache
def tensor_names(architecture: str) -> Callable[[str], str | None]:
    """Return (module's name pattern) -> its name pattern in a file of an architecture, or None; by the package gguf."""
    names = _gguf().get_tensor_name_map(_number(architecture), 1)

    @cache
    def find(module: str) -> str | None:
        found: str | None = names.get_name(module.replace("{i}", "0"))
        return found and found.replace("blk.0.", BLOCK)

    return find


@cache
def tensors_of(architecture: str) -> frozenset[str]:
    """Return the name patterns of all tensors that an architecture can have, by the package gguf."""
    gguf = _gguf()
    names = (gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[_number(architecture)])
    return frozenset(name.replace("{bid}", "{i}") for name in names)


def _number(architecture: str) -> Any:
    return next(number for number, name in _gguf().MODEL_ARCH_NAMES.items() if name == architecture)


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingDependencyError("gguf", "gguf", "Naming the tensors of a GGUF file") from error
    return gguf


def same(values: Any, config: Any) -> Any:
    """Return the values of a parameter that the file holds under a name that the package gguf does not derive."""
    return values


def has_windows(config: PretrainedConfig) -> bool:
    """Return whether a configuration names layers with a sliding window."""
    return "sliding_attention" in (getattr(config, "layer_types", None) or ())


def window_period(config: PretrainedConfig) -> int:
    """Return n if each n-th layer has no sliding window and all others have one; 0 = otherwise."""
    kinds = list(config.layer_types)
    if "full_attention" not in kinds:
        return 0
    period = kinds.index("full_attention") + 1
    regular = all((kind == "full_attention") == (i % period == period - 1) for i, kind in enumerate(kinds))
    return period if regular else 0


def _deci_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    if not sizes.layers[0][0]:
        return "llama.cpp reads the size of a head from layer 0, whose attention is skipped"
    return None


LLAMA = GgufForm("llama", DECODER_BIASES, adjacent_pairs=True, rope_factors=True, yarn=True)
DECI = GgufForm(
    "deci", DECODER_BIASES, per_layer=True, adjacent_pairs=True, rope_factors=True, yarn=True, obstacle=_deci_obstacle
)
"""LLaMA with sizes per layer (in llama.cpp for Llama-3.1-Nemotron)."""
