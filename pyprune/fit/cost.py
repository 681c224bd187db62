"""What a plan takes that can be counted: parameters, and bytes of weights and key/value cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import TYPE_CHECKING

from pyprune.errors import BudgetError, UnsupportedModelError
from pyprune.families import Family, Row, family_for
from pyprune.families.base import Axis
from pyprune.fit.formats import WeightFormat, aligned, weight_format
from pyprune.fit.measured import MeasuredCosts
from pyprune.fit.quantities import CostModel, Quantity, Widths, predicted
from pyprune.plan import PrunePlan, Sizes
from pyprune.serving.gguf.layout import COMPUTED_ROPE, ZERO_FFN, rope_type

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from pyprune.fit.choices import ChoiceOptions

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ExactCosts:
    """Counts parameters and bytes from the family's table; a :class:`CostModel` for the kinds parameters and memory.

    Parameters are those of :func:`pyprune.families.parameters_after`. Bytes are those of the exported tensors and of
    the key/value cache at full length for every context (engines that keep only a window of some layers take less).
    Neither counts biases of zeros that a stock architecture needs and the dense model lacks, nor the header, metadata
    and tokenizer of a file.

    Attributes:
        family: of the dense model.
        sizes: of the dense model.
        weights: format of the exported weights.
        kv_item: bytes of an element of the key/value cache.
        outer: row and dense shape of every parameter outside the layers; a tied head is not among them.
        inner: the same for the parameters of one layer.
        beside: bytes of exported tensors that are no parameters: rotary factors in a GGUF file.
        ranks: of tensor parallelism; each of them holds a KV head, the same one where there are fewer.
    """

    family: Family
    sizes: Sizes
    weights: WeightFormat
    kv_item: int
    outer: tuple[tuple[Row, Shape], ...]
    inner: tuple[tuple[Row, Shape], ...]
    beside: int = 0
    ranks: int = 1

    @classmethod
    def of(
        cls,
        config: PretrainedConfig,
        weights: str = "bfloat16",
        *,
        kv_item: int | None = None,
        multiple: int = 0,
        ranks: int = 1,
    ) -> ExactCosts:
        """Count for plans of a dense model.

        Args:
            config: of the dense model.
            weights: a name in :data:`pyprune.fit.formats.WEIGHT_FORMATS`.
            kv_item: bytes of an element of the key/value cache; None = what engines use for the format.
            multiple: of which all widths of the plans are multiples, beside those of the dense model; 0 = nothing is
                known. Groups that share a scale are as large as divides every width (w4a16).
            ranks: of tensor parallelism, over which the cache is counted.

        Raises:
            ConfigError: an unknown format.
            UnsupportedModelError: an unknown family, or layers that differ from each other in a dense model.
        """
        family = family_for(config)
        found = cls.of_shapes(family, config, dense_shapes(config), weights, kv_item=kv_item)
        sizes = found.sizes
        widths = (sizes.hidden_size, sizes.num_attention_heads * sizes.head_dim, sizes.intermediate_size, multiple)
        return replace(found, weights=found.weights.grouped(widths), ranks=ranks)

    @classmethod
    def of_plan(cls, config: PretrainedConfig, weights: str, plan: PrunePlan) -> ExactCosts:
        """Count for one plan, whose own widths decide about groups, as they do in its export.

        Args:
            config: see :meth:`of`.
            weights: see :meth:`of`.
            plan: of that model.

        Raises:
            ConfigError, UnsupportedModelError: see :meth:`of`.
        """
        found = cls.of_shapes(family_for(config), config, dense_shapes(config), weights)
        return replace(found, weights=found.weights.grouped((common_multiple(plan),)))

    @classmethod
    def of_choices(
        cls, config: PretrainedConfig, weights: str, choices: ChoiceOptions, *, ranks: int = 1
    ) -> ExactCosts:
        """Count for every plan that a search may find among these choices.

        Args:
            config: see :meth:`of`.
            weights: see :meth:`of`.
            choices: whose widths and hidden sizes the plans have.
            ranks: see :meth:`of`.

        Raises:
            ConfigError, UnsupportedModelError: see :meth:`of`.
        """
        head_dim = family_for(config).sizes(config).head_dim
        return cls.of(config, weights, multiple=gcd(choices.ffn_multiple, head_dim, *choices.hidden), ranks=ranks)

    @classmethod
    def of_shapes(
        cls,
        family: Family,
        config: PretrainedConfig,
        shapes: Mapping[str, Shape],
        weights: str = "bfloat16",
        *,
        kv_item: int | None = None,
    ) -> ExactCosts:
        """The same, for a model whose parameter shapes are known: name -> shape, tied parameters once.

        Raises:
            ConfigError, UnsupportedModelError: see :meth:`of`.
        """
        form = weight_format(weights)
        outer: list[tuple[Row, Shape]] = []
        layers: dict[int, list[tuple[Row, Shape]]] = {}
        for name, shape in shapes.items():
            row, index = family.match(name)
            (outer if index is None else layers.setdefault(index, [])).append((row, shape))
        found = list(layers.values())
        if any(layer != found[0] for layer in found):
            raise UnsupportedModelError(
                f"The layers of this {family.model_type!r} model differ in the shapes of their parameters, so that "
                "what a layer takes does not depend on its widths alone. Start from a dense model."
            )
        return cls(
            family,
            family.sizes(config),
            form,
            form.kv_item if kv_item is None else kv_item,
            tuple(outer),
            tuple(found[0]) if found else (),
            _rotary_bytes(config, family.sizes(config).head_dim) if form.layout == "gguf" else 0,
        )

    def fixed(self, quantity: Quantity, hidden_size: int) -> float:
        """Parameters or bytes of embedding, head and final norm, for this many channels of the residual stream.

        Raises:
            BudgetError: a quantity that is measured, not counted.
        """
        whole = Widths(0, 0, 0)
        beside = self.beside if quantity.kind == "memory" else 0
        return float(self._sum(quantity, self.outer, hidden_size, whole) + beside)

    def layer(self, quantity: Quantity, hidden_size: int, widths: Widths) -> float:
        """Parameters of one layer, or bytes of its weights and of its keys and values for every context.

        Raises:
            BudgetError: a quantity that is measured, not counted.
        """
        blocks = {"attention": widths.query_heads, "mlp": widths.ffn, None: 1}
        rows = [(row, shape) for row, shape in self.inner if blocks[row.block]]
        found = self._sum(quantity, rows, hidden_size, widths)
        if quantity.kind == "memory":
            found += self._cache(quantity, widths)
            if self.weights.layout == "gguf" and not widths.ffn:
                found += self._zero_ffn(hidden_size)
        return float(found)

    def head_pair(self, quantity: Quantity) -> float:
        """Nothing: sizes that differ between layers take no parameters or bytes of their own."""
        return 0.0

    def _sum(self, quantity: Quantity, rows: Iterable[tuple[Row, Shape]], hidden: int, widths: Widths) -> int:
        shapes = [(row, self._shape(row, shape, hidden, widths)) for row, shape in rows]
        if quantity.kind == "parameters":
            return sum(prod(shape) for _, shape in shapes)
        if quantity.kind == "memory":
            return sum(self.weights.nbytes(row, shape, head=self._is_head(row)) for row, shape in shapes)
        raise BudgetError(
            f"{quantity} is a time, which is measured and not counted: `pyprune profile MODEL` measures what it needs."
        )

    def _shape(self, row: Row, shape: Shape, hidden: int, widths: Widths) -> Shape:
        head_dim = self.sizes.head_dim
        cut: dict[Axis, int] = {
            "hidden": hidden,
            "heads": widths.query_heads * head_dim,
            "kv_heads": widths.kv_heads * head_dim,
            "ffn": widths.ffn,
        }
        return tuple(
            sum(cut[axis] for axis in axes) if axes[0] in cut else size
            for axes, size in zip(row.dimensions, shape, strict=True)
        )

    def _is_head(self, row: Row) -> bool:
        tied = all(other.role != "head" for other, _ in self.outer)
        return row.role == ("embedding" if tied else "head") and row.axes[0] == "vocab"

    def _cache(self, quantity: Quantity, widths: Widths) -> int:
        heads = max(widths.kv_heads, self.ranks) if widths.kv_heads else 0
        return 2 * heads * self.sizes.head_dim * self.kv_item * quantity.tokens * quantity.batch

    def _zero_ffn(self, hidden: int) -> int:
        """Bytes of the FFN of zeros that stands for a skipped MLP in a GGUF file."""
        bare = Widths(0, 0, ZERO_FFN)
        rows = [(row, self._shape(row, shape, hidden, bare)) for row, shape in self.inner if row.block == "mlp"]
        return sum(self.weights.nbytes(row, shape, head=False) for row, shape in rows if not row.is_bias)


def _rotary_bytes(config: PretrainedConfig, head_dim: int) -> int:
    """Bytes of what divides the rotary frequencies, float32, where llama.cpp cannot compute it (LLaMA 3)."""
    rotates = getattr(config, "rope_parameters", None) is not None
    return aligned(4 * (head_dim // 2)) if rotates and rope_type(config) not in COMPUTED_ROPE else 0


def dense_shapes(config: PretrainedConfig) -> dict[str, Shape]:
    """Name -> shape of every parameter of a model with this configuration, tied ones once; nothing is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    from pyprune.families import parameter_shapes

    with torch.device("meta"):
        return parameter_shapes(AutoModelForCausalLM.from_config(config))


@dataclass(frozen=True)
class Costs:
    """All quantities in one :class:`CostModel`: what is counted, and what was measured.

    Attributes:
        exact: counts parameters and memory.
        measured: predicts prefill and generation; None = there is no profile.
    """

    exact: CostModel
    measured: MeasuredCosts | None = None

    def fixed(self, quantity: Quantity, hidden_size: int) -> float:
        """See :class:`CostModel`.

        Raises:
            BudgetError: a time, without a profile or outside of what the profile measured.
        """
        return self._of(quantity).fixed(quantity, hidden_size)

    def layer(self, quantity: Quantity, hidden_size: int, widths: Widths) -> float:
        """See :class:`CostModel`.

        Raises:
            BudgetError: see :meth:`fixed`.
        """
        return self._of(quantity).layer(quantity, hidden_size, widths)

    def head_pair(self, quantity: Quantity) -> float:
        """See :class:`CostModel`.

        Raises:
            BudgetError: see :meth:`fixed`.
        """
        return self._of(quantity).head_pair(quantity)

    def predicted(self, quantity: Quantity, plan: PrunePlan) -> float:
        """What a plan takes, in the quantity's unit.

        Raises:
            BudgetError: see :meth:`fixed`.
        """
        return predicted(self, quantity, plan)

    def _of(self, quantity: Quantity) -> CostModel:
        if not quantity.is_timed:
            return self.exact
        if self.measured is None:
            raise no_profile(str(quantity))
        return self.measured


def common_multiple(plan: PrunePlan) -> int:
    """The largest number of which the inputs of a plan's linear layers are multiples."""
    heads = (len(layer.query_heads) * plan.dense.head_dim for layer in plan.layers)
    return gcd(len(plan.hidden), *heads, *(len(layer.ffn) for layer in plan.layers))


def no_profile(what: str) -> BudgetError:
    """The refusal of times where nothing says what takes how long."""
    return BudgetError(
        f"{what} needs a profile of this machine. Make one with `pyprune profile MODEL`, and name it with --profile."
    )
