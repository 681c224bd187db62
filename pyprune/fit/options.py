"""Options of `pyprune fit`. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from typing_extensions import override

from pyprune.config.base import Config, option
from pyprune.config.cut import ReconstructConfig
from pyprune.config.data import DataConfig
from pyprune.config.run import PruneConfig
from pyprune.fit.choices import RULED, ChoiceOptions
from pyprune.fit.formats import weight_format
from pyprune.fit.solve import SolveOptions
from pyprune.fit.values import ValueOptions

if TYPE_CHECKING:
    from pyprune.fit.sizes import SizeRules


@dataclass(frozen=True)
class FitOptions(Config):
    """How a model is found for a budget.

    Attributes:
        data: text for reconstruction; its source is also used for scoring, measuring, judging and training.
        window: tokens of the sequences for scores, losses and the judging of candidates, at most as many as the model
            has positions. Long windows show the use of heads: with 256 tokens SmolLM2 lost heads that copy from far
            back, and code suffered most (docs/start/choose-a-budget.md).
        score_samples: sequences of that length for the scores that order the units.
        value_samples: sequences for the losses of single blocks, those for the scores among them.
        judge_samples: further sequences on which reconstructed candidates are compared.
        choices: widths of the layers; the rules for the target replace its multiples, unless ``keep_multiples`` is on.
        keep_multiples: use the multiples of ``choices``.
        tensor_parallel: devices that share every layer: widths become multiples of it, whole heads for each.
        values: how losses of single blocks are measured.
        solve: the search.
        reconstruct: how candidates are reconstructed.
        try_samples: sequences of ``data`` on which candidates are reconstructed to be compared, which takes most of the
            time; the winner is reconstructed on all. A quarter of them gave the same order of candidates at a third of
            the time (docs/start/choose-a-budget.md).
        rounds: most searches for one budget: each further one uses the measured costs of earlier candidates.
        slack: share of a limit by which a measured time may exceed it; machines are noisy.
        spare: share of the tightest limit that a timed candidate may leave unused; if it leaves more, a larger
            candidate is searched for. 1 = never.
        repeats: timed turns of each model.
        dtype: of the weights during the search; the written model is made from float32.
        device: where the model is scored and cut: auto (cuda when there is one), cpu, cuda or cuda:N.
    """

    data: DataConfig = field(default_factory=lambda: DataConfig("mixture", samples=160, sequence_length=256))
    window: int = option(1024, at_least=2, at_most=1_000_000)
    score_samples: int = option(12, at_least=1, at_most=100_000)
    value_samples: int = option(12, at_least=3, at_most=100_000)
    judge_samples: int = option(24, at_least=1, at_most=100_000)
    choices: ChoiceOptions = field(default_factory=ChoiceOptions)
    keep_multiples: bool = False
    tensor_parallel: int = option(1, at_least=1, at_most=1024)
    values: ValueOptions = field(default_factory=lambda: ValueOptions(dtype="auto"))
    solve: SolveOptions = field(default_factory=SolveOptions)
    reconstruct: ReconstructConfig = field(default_factory=lambda: ReconstructConfig(dtype="auto"))
    try_samples: int = option(40, at_least=1, at_most=100_000)
    rounds: int = option(3, at_least=1, at_most=20)
    slack: float = option(0.01, at_least=0, at_most=0.5)
    spare: float = option(0.03, at_least=0, at_most=1)
    repeats: int = option(3, at_least=1, at_most=1000)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"

    @override
    def problems(self) -> Iterator[str]:
        if self.data.layout != "stream":
            yield "data.layout is 'instructions', which is for recovery; set 'stream'."
        usual = ChoiceOptions()
        changed = [name for name in RULED if getattr(self.choices, name) != getattr(usual, name)]
        if changed and not self.keep_multiples:
            names = " and ".join(f"choices.{name}" for name in changed)
            yield f"{names} would do nothing: the rules for the target decide. Add keep_multiples=true."
        if self.tensor_parallel != 1 and self.keep_multiples:
            yield (
                f"tensor_parallel is {self.tensor_parallel} and keep_multiples is on, which would keep widths that "
                "the devices cannot share. Leave out keep_multiples."
            )

    def choices_for(self, rules: SizeRules) -> ChoiceOptions:
        """Return the choices of layers, in the multiples of the rules unless ``keep_multiples`` is on.

        Args:
            rules: of the target.

        Raises:
            ConfigError: a hidden size that is no such multiple.
        """
        return self.choices if self.keep_multiples else self.choices.with_rules(rules)

    def texts(self, positions: float | None) -> dict[str, DataConfig]:
        """Return the texts to draw, in this order and without overlap: "judged", "data" to reconstruct on, "valued".

        Args:
            positions: of the model; None = no limit.
        """
        window = int(min(self.window, positions or self.window))
        valued = max(self.score_samples, self.value_samples)
        return {
            "judged": replace(self.data, samples=self.judge_samples, sequence_length=window),
            "data": self.data,
            "valued": replace(self.data, samples=valued, sequence_length=window),
        }


def winner_config(options: FitOptions, plan: str, *, recover: bool, weights: str = "bfloat16") -> PruneConfig:
    """Return the options of the run that writes the winner: cut by its plan, reconstructed, trained as by default.

    Args:
        options: of the search.
        plan: path of the saved plan.
        recover: False leaves out the training.
        weights: format of the budget: a dtype is written as such; for other formats the model's dtype is written.
    """
    from pyprune.methods.training import with_training

    recommended = with_training(PruneConfig(method="none", plan=plan, device=options.device))
    return replace(
        recommended,
        data=options.data,
        cut=replace(recommended.cut, least_squares=options.reconstruct),
        stages=recommended.stages if recover else replace(recommended.stages, after=()),
        export_dtype=cast(Any, weights if weight_format(weights).layout == "plain" else None),
    )
