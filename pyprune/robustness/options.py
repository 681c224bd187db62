"""Options of the robustness study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from pyprune.config.base import LARGEST_SEED, Config, option
from pyprune.config.run import PruneConfig
from pyprune.config.score import ScoreAxis
from pyprune.errors import ConfigError, did_you_mean, shown
from pyprune.methods.base import own_options
from pyprune.methods.registry import is_of_another, presets, score_presets
from pyprune.methods.score.moreau import MoreauOptions
from pyprune.methods.score.obs import ObsOptions
from pyprune.methods.score.smoothgrad import SmoothGradOptions
from pyprune.quality.perplexity import WINDOWS
from pyprune.robustness.perturbations import VARIANTS, Adapter
from pyprune.run.recipe import build_config, dotted_names, parse_setting

METHODS = ("taylor", "smoothgrad", "moreau", "moreau-converged")
RATIOS = (0.05, 0.1, 0.15, 0.2)
SAME = {
    "data.source": "wikitext2",
    "data.samples": 10,
    "data.sequence_length": 128,
    "score.ranking": "global",
}
"""The text and the ranking of every method by default, so that their results are comparable. In one order over all
layers any change of a score may change the plan."""

OPEN_OPTIONS = ("data", "hidden_multiple", "score")
"""Sections of the options that may be set, in addition to the compared methods' own ones (moreau.rho). No other option
of `pyprune prune` is read."""

READ_OPTIONS = ("method", "ratio_of", *OPEN_OPTIONS)
"""Sections that identify a scoring, with the method's own options: scores and plans depend on them and on the ratio."""

OWN_OPTIONS = {"method": "methods", "ratio": "ratios", "data.seed": "seeds", "score.axes": "axes"}
"""Options that the comparison sets itself -> the field of :class:`RobustnessConfig` (and the CLI's option) for them."""


@dataclass(frozen=True)
class RobustnessConfig(Config):
    """The methods, ratios, variants, seeds and texts to compare.

    Attributes:
        methods: names of scoring presets.
        ratios: shares to remove, each in (0, 1).
        variants: of :data:`pyprune.robustness.perturbations.VARIANTS`; float32 is always compared.
        seeds: calibration seeds.
        axes: units that may be removed: heads and ffn, or hidden alone.
        texts: test texts.
        protocol: of the perplexities.
        max_tokens: tokens of each test text; None = all.
        adapter: of the variant lora.
        options: further options of every method by dotted name, for example {"data.source": "wikitext2"}; None = unset.
        settings: further options as "dotted.name=value" texts, which win over ``options``.
    """

    methods: tuple[str, ...] = METHODS
    ratios: tuple[float, ...] = RATIOS
    variants: tuple[str, ...] = VARIANTS
    seeds: tuple[int, ...] = option((0,), at_least=0, at_most=LARGEST_SEED)
    axes: tuple[ScoreAxis, ...] = ("heads", "ffn")
    texts: tuple[str, ...] = ("wikitext2",)
    protocol: str = "ppl-128"
    max_tokens: int | None = option(None, at_least=2)
    adapter: Adapter = field(default_factory=Adapter)
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()

    @override
    def problems(self) -> list[str]:
        found = [f"ratio is {r}; it must be strictly between 0 and 1." for r in self.ratios if not 0 < r < 1]
        for what, known in (("method", _known()), ("variant", VARIANTS)):
            found += [did_you_mean(name, known, what) for name in getattr(self, f"{what}s") if name not in known]
        if self.protocol not in WINDOWS:
            found.append(did_you_mean(self.protocol, WINDOWS, "perplexity protocol"))
        if self.adapter != Adapter() and "lora" not in self.variants:
            found.append(
                f"variants is {shown(list(self.variants))}, so nothing reads the options of the variant lora (rank, "
                "size or seed); leave them out, or name lora."
            )
        for name in ("methods", "ratios", "variants", "seeds", "axes", "texts"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                found.append(f"{name} is {shown(list(values))}; give at least one, and none of them twice.")
        return found

    @override
    def validate(self) -> None:
        """Check these options, and those of every method, before the model is read.

        Raises:
            ConfigError: also options that the comparison sets itself, or does not read.
        """
        super().validate()
        names = [*self.options, *(name for text in self.settings for name in dotted_names(parse_setting(text)))]
        self._refuse_own_options(names)
        for method in self.methods:
            self.of(method)
        self._refuse_unread(names)

    def of(self, method: str) -> PruneConfig:
        """Return the complete options of a method, except for the ratio and the calibration seed.

        Raises:
            ConfigError: an unknown option, or scoring in several rounds.
        """
        options: dict[str, Any] = {"score.axes": list(self.axes), **SAME}
        if "hidden" in self.axes:
            options["hidden_multiple"] = 1
        if self.axes == ("hidden",):
            options["ratio_of"] = "hidden"
        # None is an option that was not given; it must not undo the defaults.
        options |= {name: value for name, value in self.options.items() if value is not None}
        method_name = presets()[method]().method
        config = build_config(
            preset=score_presets().get(method, method),
            options={name: value for name, value in options.items() if not is_of_another(name, method_name)},
            settings=[text for text in self.settings if not is_of_another(text, method_name)],
        )
        config = replace(config, score=replace(config.score_options, closed_ends=0, further_axes=()))
        if "hidden" not in self.axes:  # nothing reads it, but it would tell scorings apart
            config = replace(config, hidden_multiple=1)
        if config.score_options.iterations > 1 or config.score_options.counts:
            raise ConfigError(
                "robustness ranks the scores of one round to several ratios; leave score.iterations at 1 and "
                "score.heads, score.ffn and score.hidden out."
            )
        if config.method == "smoothgrad":
            noise = own_options(self.of("moreau"), MoreauOptions)
            draws = noise.draws * (noise.steps if noise.redraw else 1)
            config = replace(config, options=SmoothGradOptions(draws=draws, sigma=noise.sigma, seed=noise.seed))
            config.validate()
        if config.method == "obs":  # else the variant bfloat16 would equal float32
            config = replace(config, options=replace(own_options(config, ObsOptions), dtype="float32"))
        return config

    def _refuse_own_options(self, names: Sequence[str]) -> None:
        for name in names:
            if name in OWN_OPTIONS:
                own = OWN_OPTIONS[name]
                raise ConfigError(f"{name} is set by robustness itself, for every row of its tables; use --{own}.")

    def _refuse_unread(self, names: Sequence[str]) -> None:
        """Refuse options that none of the compared methods reads."""
        compared = {presets()[method]().method for method in self.methods}
        if "smoothgrad" in compared:
            compared.add("moreau")  # whose noise it gets
        readable = [*OPEN_OPTIONS, *sorted(compared - {"smoothgrad"})]
        for name in names:
            if name.partition(".")[0] == "smoothgrad":
                raise ConfigError(
                    f"{name} is not read: smoothgrad gets the noise of moreau here, so that both see the same. Set "
                    "moreau.sigma, moreau.draws, moreau.steps or moreau.seed."
                )
            if name.partition(".")[0] not in readable:
                raise ConfigError(
                    f"robustness does not read the option {name}; those of {', '.join(readable)} may be set."
                )


def _known() -> list[str]:
    """Return the presets that can be compared, also by the second name of a preset."""
    return [*score_presets(), *(f"{name}-paper" for name in score_presets() if f"{name}-paper" in presets())]
