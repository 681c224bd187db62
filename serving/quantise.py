"""Quantised weights in the compressed-tensors format, which vLLM and Transformers read: schemes, shape rules, rounding.

Every linear layer of the decoder is quantised; embeddings, the head, norms and biases keep the dtype of the checkpoint.
Weights are rounded to the nearest value of their scale, without calibration text. The package compressed-tensors
computes the scales, rounds, packs and describes them in config.json, so that the layout is that package's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyprune.errors import ConfigError, MissingDependencyError, UnsupportedModelError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from pyprune.checkpoint.shards import Entry, TensorFiles
    from pyprune.plan import PrunePlan

MAX_SHARD_BYTES = 5 * 10**9
CLIPS = tuple(1 - step / 40 for step in range(13))
"""Shares of a group's largest weight that the search tries as the end of its range: 1 to 0.7."""
SHOWN_PROBLEMS = 1
EXPERTS_STAY = (
    "compressed-tensors' formats are for linear layers, and experts of a mixture are none: they would keep their "
    "dtype, where vLLM reads rounded ones. Write a GGUF file (q8_0 and others), which rounds experts, or do not round."
)


@dataclass(frozen=True)
class Scheme:
    """How weights, and perhaps the inputs of linear layers, are rounded.

    Attributes:
        bits: of a weight.
        kind: int or float (float8_e4m3fn).
        activations: whether inputs are rounded too, with one scale for each token taken when it is computed.
        groups: input channels that share a scale, the first that divides every layer's width is taken; () = one scale
            for each output channel.
        layout: compressed-tensors' name of how weights are stored.
        reads, writes: multiples that the input and output widths of every layer must have.
        searched: whether the range of each group is chosen by the smallest squared error; otherwise it ends at the
            largest weight.
    """

    bits: int
    kind: str
    activations: bool
    layout: str
    groups: tuple[int, ...] = ()
    reads: int = 1
    writes: int = 1
    searched: bool = False


SCHEMES = {
    "w8a8-int8": Scheme(8, "int", activations=True, layout="int-quantized"),
    "w8a16": Scheme(8, "int", activations=False, layout="pack-quantized", reads=4),
    "fp8": Scheme(8, "float", activations=True, layout="float-quantized", reads=16, writes=16),
    "w4a16": Scheme(
        4, "int", activations=False, layout="pack-quantized", groups=(128, 64, 32), reads=32, writes=32, searched=True
    ),
}
"""Name for ``--quantise`` -> scheme. Multiples are those of vLLM 0.32: scaled float8 products want widths in 16s, its
4-bit product on a CPU 32s, and 8-bit weights are packed four to a word. Its Marlin kernels (GPU) pad other widths."""


@dataclass(frozen=True)
class Quantisation:
    """A scheme that fits a model.

    Attributes:
        name: a key of :data:`SCHEMES`.
        group: input channels that share a scale; None = one scale for each output channel.
        layers: names of the linear layers whose weights are rounded -> (output width, input width).
        ignored: names of the linear layers that are left as they are (the head).
    """

    name: str
    group: int | None
    layers: dict[str, tuple[int, int]]
    ignored: tuple[str, ...]

    @property
    def scheme(self) -> Scheme:
        """The scheme of this name."""
        return SCHEMES[self.name]

    @property
    def summary(self) -> str:
        """Describe the weights in one line."""
        scheme = self.scheme
        number = f"{scheme.kind}{scheme.bits}" if scheme.kind == "int" else "float8_e4m3"
        shared = "output channel" if self.group is None else f"{self.group} input channels"
        how = "range of the smallest squared error" if scheme.searched else "range to the largest weight"
        inputs = f"; inputs {number}, a scale for each token" if scheme.activations else ""
        return f"{self.name}: {number}, a scale for each {shared}, rounded to nearest, {how}{inputs}"

    def apply(self, folder: Path) -> None:
        """Replace the weights of a complete checkpoint folder, one tensor in memory at a time, and its config.json.

        Args:
            folder: with safetensors in float32, bfloat16 or float16, and config.json.

        Raises:
            OutputError: it cannot be written.
        """
        from compressed_tensors.compressors import ModelCompressor

        from pyprune.checkpoint.shards import TensorFiles, weight_files, write_shards

        files = TensorFiles(folder)
        old = weight_files(folder)
        entries = [entry for name in files.names() for entry in self._entries(files, name)]
        part = folder / ".quantised"
        part.mkdir()
        write_shards(part, entries, self._tensors(files), MAX_SHARD_BYTES)
        for path in [*old, folder / "model.safetensors.index.json"]:
            path.unlink(missing_ok=True)
        for path in part.iterdir():
            os.replace(path, folder / path.name)
        shutil.rmtree(part)
        ModelCompressor(quantization_config=self.config()).update_config(str(folder))

    def config(self) -> Any:
        """Return compressed-tensors' QuantizationConfig for config.json."""
        from compressed_tensors.quantization import QuantizationConfig

        return QuantizationConfig(
            config_groups={"group_0": self._group()},
            format=self.scheme.layout,
            quantization_status="compressed",
            ignore=list(self.ignored),
        )

    def _group(self) -> Any:
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        scheme = self.scheme
        numbers = {"num_bits": scheme.bits, "type": scheme.kind, "symmetric": True}
        shared = {"strategy": "group", "group_size": self.group} if self.group else {"strategy": "channel"}
        inputs = QuantizationArgs(**numbers, strategy="token", dynamic=True) if scheme.activations else None
        weights = QuantizationArgs(**numbers, **shared, dynamic=False)
        return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs, format=scheme.layout)

    def _quantises(self, name: str) -> bool:
        return name.removesuffix(".weight") in self.layers and name.endswith(".weight")

    def _entries(self, files: TensorFiles, name: str) -> list[Entry]:
        """List the tensors that are written for a stored one."""
        import torch

        from pyprune.checkpoint.shards import Entry

        shape, dtype = files.shape(name), files.dtype(name)
        if not self._quantises(name):
            return [Entry(name, dtype, shape)]
        rows, columns = shape
        scale = Entry(f"{name}_scale", dtype, (rows, columns // self.group if self.group else 1))
        if self.scheme.layout != "pack-quantized":
            return [Entry(name, torch.int8 if self.scheme.kind == "int" else torch.float8_e4m3fn, shape), scale]
        packed = Entry(f"{name}_packed", torch.int32, (rows, columns * self.scheme.bits // 32))
        return [packed, scale, Entry(f"{name}_shape", torch.int64, (2,))]

    def _tensors(self, files: TensorFiles) -> Iterator[tuple[str, list[Tensor]]]:
        """Make these tensors, one stored tensor after another."""
        group = self._group()
        for name in files.names():
            values = files.read(name)
            if not self._quantises(name):
                yield name, [values]
                continue
            made = round_weight(values, group, searched=self.scheme.searched)
            for entry in self._entries(files, name):
                yield entry.name, [made[entry.name.removeprefix(name.removesuffix("weight"))]]


def round_weight(weight: Tensor, scheme: Any, *, searched: bool = False) -> dict[str, Tensor]:
    """Round one weight.

    Args:
        weight: [output, input], float32, bfloat16 or float16.
        scheme: compressed-tensors' QuantizationScheme.
        searched: choose the range of each scale by the smallest squared error of its weights, out of :data:`CLIPS`.

    Returns:
        The stored tensors: weight (int8 or float8_e4m3fn) or weight_packed and weight_shape, and weight_scale
        ([output, 1] or [output, groups]) in the weight's dtype.
    """
    from compressed_tensors.compressors.base import BaseCompressor

    wide = weight.float()
    scale = _best_scale(wide, scheme, weight.dtype) if searched else _scale(wide, scheme, weight.dtype, 1.0)
    compressor: Any = BaseCompressor.get_value_from_registry(str(scheme.format))
    # In float32, so that dividing does not round before rounding does; the scale is the stored one.
    made = compressor.compress({"weight": wide, "weight_scale": scale.float()}, scheme)
    return {**made, "weight_scale": scale}


def _scale(weight: Tensor, scheme: Any, dtype: Any, clip: float) -> Tensor:
    """Return [output, groups]: the scale at which a group's range ends at ``clip`` times its largest weight."""
    from compressed_tensors.quantization.utils import calculate_qparams

    ends = _split_groups(weight, scheme).abs().amax(dim=-1) * clip
    return _round_scale(calculate_qparams(-ends, ends, scheme.weights)[0], dtype)


def _round_scale(scale: Tensor, dtype: Any) -> Tensor:
    """Round a scale to the dtype of the weights without shortening a group's range.

    Below 6e-5 float16 has fewer and fewer digits, and finally none, so that such a scale is rounded up.
    """
    import torch

    facts = torch.finfo(dtype)
    step = facts.smallest_normal * facts.eps
    return torch.where(scale < facts.smallest_normal, (scale / step).ceil() * step, scale).to(dtype)


def _split_groups(weight: Tensor, scheme: Any) -> Tensor:
    """Return [output, groups, input channels of a group]."""
    size: int = scheme.weights.group_size or weight.shape[-1]
    grouped: Tensor = weight.unflatten(-1, (-1, size))
    return grouped


def _best_scale(weight: Tensor, scheme: Any, dtype: Any) -> Tensor:
    import torch
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    best = _scale(weight, scheme, dtype, 1.0)
    least = torch.full_like(best, torch.inf, dtype=torch.float32)
    for clip in CLIPS:
        scale = _scale(weight, scheme, dtype, clip)
        rounded = fake_quantize(weight, scale.float(), None, scheme.weights)
        error = _split_groups(weight - rounded, scheme).square().sum(dim=-1)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def choose_quantisation(model: PreTrainedModel, name: str) -> Quantisation:
    """Check that every linear layer of a model has a shape that a scheme takes.

    Args:
        model: dense or cut, also with sizes that differ between layers.
        name: a key of :data:`SCHEMES`.

    Raises:
        ConfigError: an unknown scheme, a mixture of experts, or layers whose widths the scheme does not take; the
            message names layer, width and multiple, and what to do.
        UnsupportedModelError: the model has weights in linear layers that its family does not describe.
        MissingDependencyError: compressed-tensors is not installed.
    """
    from pyprune.families import dense_family
    from pyprune.probe.experts import expert_modules

    if name not in SCHEMES:
        raise ConfigError(did_you_mean(name, SCHEMES, "quantisation"))
    if dense_family(model).mixture_fields and expert_modules(model):
        raise ConfigError(f"{name} is not written for this {model.config.model_type!r} model: {EXPERTS_STAY}")
    check_quantising_installed()
    layers, ignored = _linear_layers(model)
    problems = list(_problems(model, layers, name))
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        raise ConfigError(
            [*problems[:SHOWN_PROBLEMS], *([f"{more} more layers have such widths."] if more > 0 else [])]
        )
    groups = SCHEMES[name].groups
    group = next((g for g in groups if all(width % g == 0 for _, width in layers.values())), None)
    return Quantisation(name, group, layers, ignored)


def check_quantising_installed() -> None:
    """Raise :class:`MissingDependencyError` without the package that rounds weights."""
    if find_spec("compressed_tensors") is None:
        raise MissingDependencyError("compressed-tensors", "vllm", "Writing quantised weights")


def quantising_obstacle(plan: PrunePlan, name: str) -> str | None:
    """Explain why a scheme does not take the widths of a plan; None where it does. See :func:`choose_quantisation`.

    Args:
        plan: of a dense model.
        name: a key of :data:`SCHEMES`.
    """
    scheme, head_dim = SCHEMES[name], plan.dense.head_dim
    for index, layer in enumerate(plan.layers):
        both = {"attention": len(layer.query_heads) * head_dim, "FFN": len(layer.ffn), "hidden": len(plan.hidden)}
        widths = [(what, size, lcm(scheme.reads, scheme.writes)) for what, size in both.items()]
        for what, size, multiple in (*widths, ("key and value", len(layer.kv_heads) * head_dim, scheme.writes)):
            if size % multiple:
                return f"Layer {index} has {size} {what} channels; {name} needs a multiple of {multiple}."
    return None


def _linear_layers(model: PreTrainedModel) -> tuple[dict[str, tuple[int, int]], tuple[str, ...]]:
    """Linear layers that are quantised -> (output, input width), and names of those that are not (the head)."""
    from torch import nn

    head = model.get_output_embeddings()
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    ignored = tuple(name for name, module in found.items() if module is head)
    layers = {name: (m.out_features, m.in_features) for name, m in found.items() if name not in ignored}
    if not layers:
        raise UnsupportedModelError("The model has no linear layers but its head: there is nothing to quantise.")
    return layers, ignored


def _problems(model: PreTrainedModel, layers: Mapping[str, tuple[int, int]], name: str) -> Iterator[str]:
    scheme = SCHEMES[name]
    axes = _axes(model)
    for layer, (output, width) in layers.items():
        for dim, verb, size, multiple in ((0, "writes", output, scheme.writes), (1, "reads", width, scheme.reads)):
            if size % multiple:
                advice = _advice(axes(layer)[dim], multiple)
                yield f"{layer} {verb} {size} channels; {name} needs a multiple of {multiple}. {advice}"


def _axes(model: PreTrainedModel) -> Callable[[str], tuple[tuple[str, ...], ...]]:
    from pyprune.families import dense_family

    family = dense_family(model)
    return lambda layer: family.match(f"{layer}.weight")[0].dimensions or (("inner",), ("inner",))


def _advice(axes: tuple[str, ...], multiple: int) -> str:
    """Say how the widths of these axes become legal."""
    ways = {
        "ffn": f"Cut FFN widths in {multiple}s (--set score.ffn_multiple={multiple})",
        "hidden": f"Cut the hidden size in {multiple}s (--set hidden_multiple={multiple})",
    }
    heads = f"Keep numbers of heads whose channels together are a multiple of {multiple}"
    advice = dict.fromkeys(ways.get(axis, heads) for axis in axes)
    any_width = [name for name, scheme in SCHEMES.items() if scheme.reads == scheme.writes == 1]
    return f"{', or: '.join(advice)}; or choose another --quantise ({', '.join(any_width)} takes any width)."
