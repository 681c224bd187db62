"""Count the parameters of a plan, and the bytes of its weights and key/value cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import TYPE_CHECKING

from typing_extensions import override

from pyprune.errors import BudgetError, UnsupportedModelError
from pyprune.families import Family, Row, check_table, family_for, parameter_shapes
from pyprune.families.base import SHARED_AXES, Axis, unit_of
from pyprune.families.infer import build_on_meta
from pyprune.families.latent import latent_channels
from pyprune.fit.formats import WeightFormat, align, weight_format
from pyprune.fit.measured import MeasuredCosts
from pyprune.fit.quantities import CostModel, Quantity, Widths
from pyprune.plan import DECODER, BlockSizes, PrunePlan, Sizes
from pyprune.serving.gguf.layout import COMPUTED_ROPE, ZERO_FFN, rope_type

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from pyprune.fit.choices import ChoiceOptions

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ExactCosts(CostModel):
    """Counts parameters and memory from the family's table.

    Parameters are those of :func:`pyprune.families.parameters_after`. Bytes are those of the exported tensors and of
    the key/value cache at full length for every context (engines that keep only a window of some layers take less).
    Biases of zeros that a stock architecture needs and the dense model lacks are not counted, nor the header, metadata
    and tokenizer of a file.

    Attributes:
        family: of the dense model.
        sizes: of the dense model.
        weights: format of the exported weights.
        kv_item: bytes of an element of the key/value cache.
        outer: row and dense shape of every parameter outside the layers; a tied head is not among them.
        inner: kind -> row and dense shape of the parameters of a layer.
        extra: bytes of exported tensors that are no parameters: rotary factors in a GGUF file.
        ranks: of tensor parallelism; each of them holds a KV head, a copy if there are fewer heads than ranks.
        latent: channels of a token that the cache of latent attention holds, on every rank and whatever the heads;
            0 = the cache holds keys and values of heads.
    """

    family: Family
    sizes: Sizes
    weights: WeightFormat
    kv_item: int
    outer: tuple[tuple[Row, Shape], ...]
    inner: Mapping[str, Sequence[tuple[Row, Shape]]]
    extra: int = 0
    ranks: int = 1
    latent: int = 0

    @classmethod
    def of(
        cls,
        config: PretrainedConfig,
        weights: str = "bfloat16",
        *,
        plan: PrunePlan | None = None,
        choices: ChoiceOptions | None = None,
        kv_item: int | None = None,
        ranks: int = 1,
    ) -> ExactCosts:
        """Count for plans of a dense model.

        Args:
            config: of the dense model.
            weights: a name in :data:`pyprune.fit.formats.WEIGHT_FORMATS`.
            plan: count for this plan alone. The groups that share a scale (w4a16) are the largest that divide its
                widths, as in its export; without it, the largest that divide the dense widths and all ``choices``.
            choices: widths and hidden sizes of the plans.
            kv_item: bytes of an element of the key/value cache; None = as engines use for the format.
            ranks: of tensor parallelism, over which the cache is counted.

        Raises:
            ConfigError: an unknown format.
            UnsupportedModelError: an unknown family, one without a table, or layers of a kind that differ from each
                other in a dense model.
        """
        family, form = family_for(config), weight_format(weights)
        check_table(family, "The cost of a layer")
        sizes = family.sizes(config)
        outer: list[tuple[Row, Shape]] = []
        layers: dict[int, list[tuple[Row, Shape]]] = {}
        for name, shape in dense_shapes(config).items():
            row, index = family.match(name, sizes.layers)
            if index is not None:
                layers.setdefault(index, []).append((row, shape))
            elif "layers" not in row.axes:
                outer.append((row, shape))
            else:  # a part of it belongs to each layer
                pairs = zip(row.axes, shape, strict=True)
                part = tuple(sizes.layer_inputs if axis == "layers" else n for axis, n in pairs)
                for each in range(sizes.num_layers):
                    layers.setdefault(each, []).append((row, part))
        inner = {kind: layers.get(sizes.layers.index(kind), []) for kind in sizes.kinds}
        if any(layer != inner[sizes.layers[index]] for index, layer in layers.items()):
            raise UnsupportedModelError(
                f"The layers of this {family.model_type!r} model differ in the shapes of their parameters, so that "
                "the cost of a layer does not depend on its widths alone. Start from a dense model."
            )
        head_dims = [block.head_dim for blocks in sizes.kinds.values() for block in blocks.values() if block.head_dim]
        widths = [common_multiple(PrunePlan.identity(family.model_type, sizes))]
        closed = [shape[-1] for rows in inner.values() for row, shape in rows if row.axes[1:] == ("inner",)]
        if choices is not None:
            widths.append(gcd(choices.ffn_multiple, *head_dims, *choices.hidden))
        return cls(
            family,
            sizes,
            form.choose_group((widths if plan is None else [common_multiple(plan)]) + closed),
            form.kv_item if kv_item is None else kv_item,
            tuple(outer),
            inner,
            _rotary_bytes(config, sizes.head_dim) if form.layout == "gguf" else 0,
            ranks,
            latent_channels(config),
        )

    @property
    def states(self) -> list[str]:
        """Names of closed blocks that may hold a state for each context, whose bytes are not known."""
        blocks = [(name, block) for kind in self.sizes.kinds.values() for name, block in kind.items()]
        return [name for name, block in blocks if not block.axes and name != "mlp"]

    @override
    def base(self, quantity: Quantity, hidden_size: int) -> float:
        """Count parameters or bytes of embedding, head and final norm.

        Raises:
            BudgetError: a time.
        """
        extra = self.extra if quantity.kind == "memory" else 0
        return float(self._sum(quantity, self.outer, hidden_size, None) + extra)

    @override
    def layer(self, quantity: Quantity, hidden_size: int, widths: Widths) -> float:
        """Count the parameters of one layer, or the bytes of its weights and of its keys and values for every context.

        Raises:
            BudgetError: a time.
        """
        blocks = {name: self._keeps(block, widths) for name, block in self.sizes.kinds[widths.kind].items()}
        rows = [(row, shape) for row, shape in self.inner[widths.kind] if row.block is None or blocks[row.block]]
        total = self._sum(quantity, rows, hidden_size, widths)
        if quantity.kind == "memory":
            total += self._cache(quantity, widths)
            if self.weights.layout == "gguf" and not widths.ffn:
                total += self._zero_ffn(hidden_size)
        return float(total)

    @override
    def head_pair(self, quantity: Quantity) -> float:
        return 0.0

    def active(self, plan: PrunePlan, chosen: int) -> int:
        """Count the parameters of a plan that one token reads: of a mixture, those of the experts chosen for it.

        Args:
            plan: of the dense model.
            chosen: experts that each token reads; 0 = the model has no mixtures.
        """
        unread = 0
        for widths in map(Widths.of, plan.layers):
            rows = [(row, shape) for row, shape in self.inner[widths.kind] if row.of_each_expert and widths.experts]
            whole = sum(prod(self._shape(row, shape, len(plan.hidden), widths)) for row, shape in rows)
            unread += whole // widths.experts * (widths.experts - chosen) if rows else 0
        return int(self.predict(Quantity("parameters"), plan)) - unread

    def _keeps(self, block: BlockSizes, widths: Widths) -> bool:
        """Return whether a layer of these widths has a block: one with heads or FFN channels left, or a closed one."""
        kept = [n for axis, n in _units(widths).items() if axis in block.axes]
        return any(kept) or not kept

    def _sum(self, quantity: Quantity, rows: Iterable[tuple[Row, Shape]], hidden: int, widths: Widths | None) -> int:
        shapes = [(row, self._shape(row, shape, hidden, widths)) for row, shape in rows]
        if quantity.kind == "parameters":
            return sum(prod(shape) for _, shape in shapes)
        if quantity.kind == "memory":
            return sum(self.weights.nbytes(row, shape, head=self._is_head(row)) for row, shape in shapes)
        raise BudgetError(
            f"{quantity} is a time, which is predicted from a profile and not counted: see `pyprune profile MODEL`."
        )

    def _shape(self, row: Row, shape: Shape, hidden: int, widths: Widths | None) -> Shape:
        pairs = zip(row.dimensions, shape, strict=True)
        return tuple(sum(self._size(axis, row, size, hidden, widths) for axis in axes) for axes, size in pairs)

    def _size(self, axis: Axis, row: Row, size: int, hidden: int, widths: Widths | None) -> int:
        """Return the size of a dimension along an axis, of ``size`` in the dense model if it is never cut."""
        if axis == "hidden":
            return hidden
        if axis in SHARED_AXES or widths is None:
            return size
        layer = self.sizes.layers.index(widths.kind)
        name, channels = unit_of(axis, self.sizes, layer, row.head_dim)
        return channels * _units(widths).get(name, self.sizes.units(name, layer))

    def _is_head(self, row: Row) -> bool:
        tied = all(other.role != "head" for other, _ in self.outer)
        return row.role == ("embedding" if tied else "head") and row.axes[0] == "vocab"

    def _cache(self, quantity: Quantity, widths: Widths) -> int:
        """Count the bytes of keys and values.

        Raises:
            BudgetError: a block has another state.
        """
        if quantity.tokens and self.states:
            raise BudgetError(
                f"The memory that {self.states[0]} takes for each context is not counted. Limit parameters instead."
            )
        blocks = self.sizes.kinds[widths.kind]
        heads = max(widths.kv_heads, self.ranks) if widths.kv_heads else 0
        head_dim = next((block.head_dim for block in blocks.values() if block.head_dim), 0)
        channels = self.ranks * self.latent * bool(heads) if self.latent else 2 * heads * head_dim
        return channels * self.kv_item * quantity.tokens * quantity.batch

    def _zero_ffn(self, hidden: int) -> int:
        """Count the bytes of the FFN of zeros that replaces a skipped MLP in a GGUF file."""
        bare = Widths(0, 0, ZERO_FFN)
        rows = [
            (row, self._shape(row, shape, hidden, bare)) for row, shape in self.inner[DECODER] if row.block == "mlp"
        ]
        return sum(self.weights.nbytes(row, shape, head=False) for row, shape in rows if not row.is_bias)


def _units(widths: Widths) -> dict[str, int]:
    """Return the kept units of a layer, by axis of a plan."""
    return {axis: getattr(widths, axis) for axis in ("query_heads", "kv_heads", "ffn", "experts")}


def _rotary_bytes(config: PretrainedConfig, head_dim: int) -> int:
    """Count the bytes of the float32 factors of rotary frequencies that llama.cpp cannot compute (LLaMA 3)."""
    rotates = getattr(config, "rope_parameters", None) is not None
    return align(4 * (head_dim // 2)) if rotates and rope_type(config) not in COMPUTED_ROPE else 0


def dense_shapes(config: PretrainedConfig) -> dict[str, Shape]:
    """Name -> shape of every parameter of a model with this configuration, tied ones once; allocates nothing."""
    return parameter_shapes(build_on_meta(config))


@dataclass(frozen=True)
class Costs(CostModel):
    """Predicts all quantities: counts parameters and memory, and predicts times from a profile.

    Its methods raise :class:`BudgetError` for a time without a profile, or outside of the measured workloads.

    Attributes:
        exact: counts parameters and memory.
        measured: predicts prefill and generation; None = no profile.
        factors: quantity -> measured over predicted, by which predictions are multiplied; 1 if missing.
    """

    exact: ExactCosts
    measured: MeasuredCosts | None = None
    factors: Mapping[Quantity, float] = field(default_factory=dict)

    @override
    def base(self, quantity: Quantity, hidden_size: int) -> float:
        return self.factors.get(quantity, 1.0) * self._model(quantity).base(quantity, hidden_size)

    @override
    def layer(self, quantity: Quantity, hidden_size: int, widths: Widths) -> float:
        return self.factors.get(quantity, 1.0) * self._model(quantity).layer(quantity, hidden_size, widths)

    @override
    def head_pair(self, quantity: Quantity) -> float:
        return self.factors.get(quantity, 1.0) * self._model(quantity).head_pair(quantity)

    def _model(self, quantity: Quantity) -> CostModel:
        if not quantity.is_timed:
            return self.exact
        if self.measured is None:
            raise profile_missing(str(quantity))
        return self.measured


def common_multiple(plan: PrunePlan) -> int:
    """Return the largest number of which the inputs of a plan's linear layers are multiples."""
    heads = (len(layer.query_heads) * plan.dense.channels("query_heads", layer.index) for layer in plan.layers)
    return gcd(len(plan.hidden), *heads, *(len(layer.ffn) for layer in plan.layers))


def profile_missing(what: str) -> BudgetError:
    """Make the error of limits on times without a profile."""
    return BudgetError(
        f"{what} needs a profile of this machine. Make one with `pyprune profile MODEL`, and name it with --profile."
    )
