"""Models of serving_card.py and soak.py: whole layers less, and two cuts of heads and FFN that keep equally many."""

from __future__ import annotations

from bench._plans import with_ffn, with_groups
from pyprune.errors import ConfigError
from pyprune.plan import PrunePlan

UNIFORM, UNEQUAL = "uniform widths", "unequal widths"
LEAST_LAYERS, PARTS = 4, 24
"""FFN widths are multiples of a 24th of the dense one: of 64 channels for SmolLM2-135M."""
KEPT_PARTS = 19
PARTS_APART = (0, 2, 5)
"""By how many 24ths the FFNs of two neighbours differ from the middle, one up and one down, in turn."""


def card_plans(dense: PrunePlan) -> dict[str, PrunePlan]:
    """Name -> plan: two with fewer layers, then narrower ones of equal parameters, with and without equal layers.

    Of SmolLM2-135M's 30 layers 23 and 15 stay. Its uniform widths are 6 of 9 query heads, 2 of 3 KV heads and 1,216 of
    1,536 FFN channels: 18.9 % of all parameters less, as near to 20 % as whole KV groups and multiples of 64 channels
    come. Neighbours have more heads and fewer channels or the other way round in the unequal one.

    Args:
        dense: the plan that removes nothing, of a LLaMA.

    Raises:
        ConfigError: another family, or a model that is too small for these cuts.
    """
    sizes = dense.dense
    if dense.model_type != "llama":
        raise ConfigError(f"The model is a {dense.model_type}; ideals are computed for llama. Name one with --model.")
    if sizes.num_layers < LEAST_LAYERS or sizes.intermediate_size < PARTS:
        raise ConfigError(
            f"The model has {sizes.num_layers} layers and {sizes.intermediate_size} FFN channels; the card needs at "
            f"least {LEAST_LAYERS} and {PARTS}. Name a larger one with --model."
        )
    total = sizes.num_layers
    fewer = round(total * 7 / 30)
    middle = (total - fewer) // 2
    return {
        f"{total - fewer} layers": dense.drop_layers(range(middle, middle + fewer)),
        f"{total - total // 2} layers": dense.drop_layers(range(1, total, 2)),
        UNIFORM: _uniform(dense),
        UNEQUAL: _unequal(dense),
    }


def _kept_groups(dense: PrunePlan) -> int:
    return max(1, round(dense.dense.num_key_value_heads * 2 / 3))


def _uniform(dense: PrunePlan) -> PrunePlan:
    """Two thirds of the KV groups and 19 of 24 parts of the FFN in every layer."""
    width = KEPT_PARTS * (dense.dense.intermediate_size // PARTS)
    return with_ffn(with_groups(dense, dense.kept_layers, _kept_groups(dense)), [width])


def _unequal(dense: PrunePlan) -> PrunePlan:
    """Keep the sums over each pair of neighbours; one has more heads and fewer FFN channels than the other."""
    sizes = dense.dense
    part, kept = sizes.intermediate_size // PARTS, _kept_groups(dense)
    apart = min(1, sizes.num_key_value_heads - kept, kept - 1)
    plan, widths = dense, []
    for index in dense.kept_layers:
        pair, sign = index // 2, (1, -1)[index % 2]
        alone = index == sizes.num_layers - 1 and sign > 0
        parts = 0 if alone else sign * PARTS_APART[pair % len(PARTS_APART)]
        groups = 0 if alone else -sign * apart * (pair % 2)
        widths.append((KEPT_PARTS + parts) * part)
        plan = with_groups(plan, [index], kept + groups)
    return with_ffn(plan, widths)
