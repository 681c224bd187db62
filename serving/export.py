"""Turn a checkpoint or a model into the folder that is served.

The cut decides which architecture a compacted model becomes (``stock_targets`` in pyprune.families). Export reads that
decision, converts the dtype and warns of sizes that a server does not run well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pyprune.errors import ConfigError, did_you_mean
from pyprune.families import family_of_type
from pyprune.families.prefix import is_pruned_type
from pyprune.serving.checkpoints import read_checkpoint
from pyprune.serving.vllm.limits import serving_warnings
from pyprune.serving.widths import layer_widths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pyprune.checkpoint.load import ModelSource
    from pyprune.plan import PrunePlan

ExportTarget = Literal["auto", "stock", "pruned"]
TARGETS: tuple[ExportTarget, ...] = ("auto", "stock", "pruned")


@dataclass(frozen=True)
class ExportReport:
    """The folder that was written.

    Attributes:
        path: the folder.
        architecture: class name that loads it.
        stock: True when plain Transformers and vLLM load it without pyprune.
        reasons: why each stock architecture does not fit (empty for a stock one).
        warnings: sizes that a server refuses or runs slowly, one sentence each.
        parameters: stored parameters.
        bytes: size of the weight files in bytes.
        weights: description of quantised weights; "" without them.
    """

    path: Path
    architecture: str
    stock: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    parameters: int
    bytes: int
    weights: str = ""


def export(
    source: str | Path | PreTrainedModel,
    out: str | Path,
    *,
    target: ExportTarget = "auto",
    dtype: str | None = None,
    overwrite: bool = False,
    tokenizer: Any = None,
    plan: PrunePlan | None = None,
    provenance: Mapping[str, Any] | None = None,
    gguf_file: str | None = None,
    quantise: str | None = None,
) -> ExportReport:
    """Write a servable checkpoint folder.

    Args:
        source: a checkpoint folder, a hub id, or a model in memory (compacted or dense).
        out: the folder to create, atomically.
        target: auto keeps the architecture that compaction chose; stock refuses anything else; pruned writes the
            pruned architecture even where a stock one fits.
        dtype: float32, bfloat16 or float16 of the written weights; None keeps the source's.
        overwrite: replace an existing folder.
        tokenizer: of a model in memory (a folder brings its own).
        plan: of a model in memory (a folder brings its own).
        provenance: facts for pruning.json; added to those of a folder.
        gguf_file: name of a GGUF file inside the source, which is dequantised.
        quantise: a key of :data:`pyprune.serving.quantise.SCHEMES`: linear layers are rounded and written in the
            compressed-tensors format, everything else in ``dtype``. None = all weights in ``dtype``.

    Raises:
        ConfigError: an unknown target, dtype or quantisation, ``target="stock"`` for a model that no stock one holds,
            or layers whose widths the quantisation does not take.
        CheckpointError: the source cannot be read.
        OutputError: the folder exists, or it cannot be written.
        MissingDependencyError: ``quantise`` without the package compressed-tensors.
    """
    from pyprune.checkpoint.load import ModelSource
    from pyprune.checkpoint.save import save_checkpoint
    from pyprune.checkpoint.tower import tower_of
    from pyprune.families import count_parameters
    from pyprune.runtime.device import DTYPES
    from pyprune.runtime.files import check_output, claim_work_folder
    from pyprune.serving.quantise import SCHEMES, choose_quantisation

    check_output(out, overwrite=overwrite, reads=[source] if isinstance(source, str | Path) else [])
    if target not in TARGETS:
        raise ConfigError(did_you_mean(str(target), TARGETS, "export target"))
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(did_you_mean(dtype, DTYPES, "dtype"))
    if quantise is not None and quantise not in SCHEMES:
        raise ConfigError(did_you_mean(quantise, SCHEMES, "quantisation"))
    with claim_work_folder(out):
        facts = dict(provenance or {})
        if isinstance(source, str | Path):
            model, tokenizer, plan, facts = _load(ModelSource.of(source, gguf_file=gguf_file), facts, quantise or dtype)
        else:
            model = source
        if tower_of(model) and (quantise is not None or target == "pruned"):
            raise ConfigError(
                "A multimodal model is exported in its own architecture and without quantisation. Leave out --quantise "
                "and the target pruned."
            )
        reasons = stock_reasons(model.config, plan)
        if target == "stock" and is_pruned_type(model.config.model_type):
            raise ConfigError(_not_stock(model.config, reasons))
        if target == "pruned" and not is_pruned_type(model.config.model_type):
            model = as_pruned(model)
        rounding = choose_quantisation(model, quantise) if quantise is not None else None
        options: dict[str, Any] = {"overwrite": overwrite, "dtype": dtype, "trained": _was_trained(facts)}
        if rounding is not None:
            facts["weights"] = rounding.summary
            options["convert"] = rounding.apply
        save_checkpoint(model, tokenizer, out, plan=plan, provenance=facts, **options)
    written = read_checkpoint(out, verify=False)  # its digests were taken a moment ago
    return ExportReport(
        path=Path(out),
        architecture=written.architecture,
        stock=not is_pruned_type(model.config.model_type),
        reasons=reasons if is_pruned_type(model.config.model_type) else (),
        warnings=serving_warnings(written.config),
        parameters=count_parameters(model),
        bytes=written.bytes,
        weights=rounding.summary if rounding is not None else "",
    )


def _was_trained(facts: Mapping[str, Any]) -> bool:
    """Check whether a record names a training, after the cut or in a separate run."""
    return bool(facts.get("recoveries") or (facts.get("report") or {}).get("stages"))


def _not_stock(config: Any, reasons: Sequence[str]) -> str:
    """Explain why a model of a pruned architecture is not written as a stock one, and what to do."""
    if not reasons and len(set(layer_widths(config.to_dict()))) == 1:
        return (
            "This checkpoint is stored in pyprune's own architecture although a stock one holds its sizes: it was "
            "exported with target 'pruned'. Export the checkpoint that it was made from."
        )
    why = "; ".join(reasons) or "it has per-layer sizes"
    return (
        f"No stock architecture holds this model ({why}). Export it with target 'pruned' and serve it through the "
        "pyprune plugin."
    )


def _load(
    source: ModelSource, facts: dict[str, Any], weights: str | None
) -> tuple[PreTrainedModel, Any, PrunePlan | None, dict[str, Any]]:
    """Load a model in its dtype, with the plan and the facts of its record that hold for the written weights.

    Args:
        source: of the model.
        facts: for the record, added to those of the source.
        weights: dtype or quantisation that will be written; None = the source's.
    """
    from pyprune.checkpoint.record import take_measured

    dtype = source.dtype or "float32"
    model, tokenizer = source.load(dtype=dtype)
    if source.record is None:
        return model, tokenizer, None, {"source": source.name, **facts}
    recorded = dict(source.record.provenance)
    if weights not in (None, dtype):
        # Rounded weights have another perplexity and speed.
        earlier = take_measured(recorded)
        recorded |= {"measured_before": earlier} if earlier else {}
    return model, tokenizer, source.record.plan, {**recorded, **facts}


def stock_reasons(config: Any, plan: PrunePlan | None) -> tuple[str, ...]:
    """Return the reason of each stock target that does not hold the plan; () where one does.

    Args:
        config: of the compacted model.
        plan: of the compacted model; None = unknown, so no reason is given.
    """
    if plan is None:
        return ()
    family = family_of_type(plan.model_type)
    reasons = [(stock.model_type, stock.obstacle(config, plan)) for stock in family.stock_targets]
    return tuple(f"{name}: {reason}" for name, reason in reasons) if all(reason for _, reason in reasons) else ()


def as_pruned(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights as an instance of the pruned architecture (the tensors are shared)."""
    from transformers import AutoModelForCausalLM

    from pyprune.families import all_families, check_table, family_for, find_family
    from pyprune.modeling import pruned_config_class

    model_type = str(model.config.model_type)
    if is_pruned_type(model_type) or find_family(model_type) is None:
        raise ConfigError(did_you_mean(model_type, all_families(), "model type of a pruned architecture"))
    family = family_for(model)
    check_table(family, "The pruned architecture")
    values = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures")}
    values |= {"per_layer_config": {}, **family.head_dim_values(family.sizes(model.config))}
    config = pruned_config_class(model_type)(**values)
    pruned = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    pruned.load_state_dict(model.state_dict(), assign=True)
    pruned.tie_weights()
    pruned.generation_config = model.generation_config
    return pruned.eval()  # type: ignore[no-any-return]
