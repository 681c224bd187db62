"""Turn a checkpoint or a model into the folder that is served, and start ``vllm serve`` on it.

Which architecture a compacted model becomes is decided where it is cut (``stock_targets`` in pyprune.families);
export reads that decision, converts the dtype and says what a server will make of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import yaml

from pyprune.errors import CheckpointError, ConfigError, MissingDependencyError, did_you_mean
from pyprune.families import all_families
from pyprune.runtime.files import parse_json, read_bounded, read_json
from pyprune.runtime.progress import say, warn
from pyprune.serving.checkpoints import (
    Checkpoint,
    Hub,
    read_checkpoint,
    refuse_unread_sizes,
    rotary_scaling,
    scaled_positions,
)
from pyprune.serving.engines import KV_CACHE_SPACE, engine_environment, vllm_installed
from pyprune.serving.plugin import architectures, why_not_loaded
from pyprune.serving.releases import (
    RUNNER,
    is_cpu_build,
    is_tried_cpu_build,
    vllm_version,
    why_not_draft_in_pipeline,
    why_not_uncompiled_pipeline,
    why_not_unequal_heads,
)
from pyprune.serving.widths import (
    KV_BLOCK_TOKENS,
    PARTITION,
    LayerSizes,
    ffn_field,
    head_channels,
    layer_widths,
    named_layers,
    off_multiples,
    scale_group,
    stages_of,
    token_bytes_of,
    why_not_grouped,
    why_not_split,
    why_not_staged,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pyprune.plan import PrunePlan

ExportTarget = Literal["auto", "stock", "pruned"]
TARGETS: tuple[ExportTarget, ...] = ("auto", "stock", "pruned")

VLLM_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM 0.32's CPU attention accepts."""

ON_TRANSFORMERS = ("PhiForCausalLM", "Starcoder2ForCausalLM", "Olmo2ForCausalLM")
"""Stock architectures that vLLM 0.32 has no layers of its own for: it runs those of Transformers. The plugin has layers
for the pruned architectures of these families."""

WIDTH_MULTIPLE = 8
"""Widths that are no multiple of it leave a part of every vector register or tensor core tile empty."""

SERVE_KV_CACHE_GIB = 2
"""Key-value cache of ``pyprune serve`` on a CPU, for contexts that need no more, unless VLLM_CPU_KVCACHE_SPACE is set;
vLLM's own default is nearly all memory of the machine, which fails as soon as anything else runs."""

_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)")
_SUFFIXES = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        path: the folder.
        architecture: class name that loads it.
        stock: True when plain Transformers and vLLM load it without pyprune.
        reasons: why each stock architecture does not fit (empty for a stock one).
        warnings: what a server will not like, one sentence each.
        parameters: stored parameters.
        bytes: size of the weight files in bytes.
        weights: what the quantised weights are; empty where they are not.
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
    from pyprune.checkpoint.save import save_checkpoint
    from pyprune.families import count_parameters
    from pyprune.runtime.device import DTYPES
    from pyprune.runtime.files import check_output, claimed
    from pyprune.serving.quantise import SCHEMES, choose_quantisation

    check_output(out, overwrite=overwrite, reads=[source] if isinstance(source, str | Path) else [])
    if target not in TARGETS:
        raise ConfigError(did_you_mean(str(target), TARGETS, "export target"))
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(did_you_mean(dtype, DTYPES, "dtype"))
    if quantise is not None and quantise not in SCHEMES:
        raise ConfigError(did_you_mean(quantise, SCHEMES, "quantisation"))
    with claimed(out):
        facts = dict(provenance or {})
        if isinstance(source, str | Path):
            model, tokenizer, plan, facts = _load(source, facts, gguf_file, quantise or dtype)
        else:
            model = source
        reasons = stock_reasons(model.config, plan)
        if target == "stock" and is_pruned(model.config):
            raise ConfigError(_not_stock(model.config, reasons))
        if target == "pruned" and not is_pruned(model.config):
            model = as_pruned(model)
        rounding = choose_quantisation(model, quantise) if quantise is not None else None
        options: dict[str, Any] = {"overwrite": overwrite, "dtype": dtype}
        if rounding is not None:
            facts["weights"] = rounding.summary
            options["convert"] = rounding.apply
        save_checkpoint(model, tokenizer, out, plan=plan, provenance=facts, **options)
    written = read_checkpoint(out, verify=False)  # its digests were taken a moment ago
    return ExportReport(
        path=Path(out),
        architecture=written.architecture,
        stock=not is_pruned(model.config),
        reasons=reasons if is_pruned(model.config) else (),
        warnings=serving_warnings(written.config),
        parameters=count_parameters(model),
        bytes=written.bytes,
        weights=rounding.summary if rounding is not None else "",
    )


def _not_stock(config: Any, reasons: Sequence[str]) -> str:
    """Why a model of a pruned architecture is not written as a stock one, and what to do."""
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
    source: str | Path, facts: dict[str, Any], gguf_file: str | None, wanted: str | None
) -> tuple[PreTrainedModel, Any, PrunePlan | None, dict[str, Any]]:
    """Load a folder or hub id in its own dtype, together with what its pruning.json says of weights of ``wanted``.

    Args:
        source: folder or hub id.
        facts: for the record, added to those of the source.
        gguf_file: name of a GGUF file inside it.
        wanted: dtype or quantisation of the weights that will be written; None = the source's.
    """
    from pyprune.checkpoint.load import load_model, stored_dtype
    from pyprune.checkpoint.record import read_record, take_measured

    dtype = (stored_dtype(source) if gguf_file is None else None) or "float32"
    model, tokenizer = load_model(source, dtype=dtype, gguf_file=gguf_file)
    record = read_record(source)
    if record is None:
        return model, tokenizer, None, {"source": str(source), **facts}
    known = dict(record.provenance)
    if wanted not in (None, dtype):
        # Rounded weights have another perplexity and speed.
        earlier = take_measured(known)
        known |= {"measured_before": earlier} if earlier else {}
    return model, tokenizer, record.plan, {**known, **facts}


def is_pruned(config: Any) -> bool:
    """Return whether a configuration is one of pyprune.modeling's."""
    return str(config.model_type).startswith("pruned_")


def stock_reasons(config: Any, plan: PrunePlan | None) -> tuple[str, ...]:
    """Return why no stock target of the dense family holds the plan, target by target; nothing where one does.

    Args:
        config: of the compacted model.
        plan: what stayed; None = nothing is known, so no reason is given.
    """
    if plan is None:
        return ()
    family = all_families()[plan.model_type]
    found = [(stock.model_type, stock.why_not(config, plan)) for stock in family.stock_targets]
    return tuple(f"{name}: {reason}" for name, reason in found) if all(reason for _, reason in found) else ()


def as_pruned(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights as an instance of the pruned architecture (the tensors are shared)."""
    from transformers import AutoModelForCausalLM

    from pyprune.families import family_for
    from pyprune.modeling import PRUNED_CONFIGS

    model_type = str(model.config.model_type)
    if model_type not in PRUNED_CONFIGS:
        raise ConfigError(did_you_mean(model_type, PRUNED_CONFIGS, "model type of a pruned architecture"))
    values = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures")}
    values |= {"head_dim": family_for(model).sizes(model.config).head_dim, "per_layer_config": {}}
    config = PRUNED_CONFIGS[model_type](**values)
    pruned = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    pruned.load_state_dict(model.state_dict(), assign=True)
    pruned.tie_weights()
    pruned.generation_config = model.generation_config
    return pruned.eval()  # type: ignore[no-any-return]


def serving_warnings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what vLLM will refuse or run slowly, read from config.json as plain data."""
    found: list[str] = []
    hidden, head_dim = config.get("hidden_size") or 0, head_channels(config)
    is_said = (config.get("head_dim") or config.get("num_attention_heads")) and not config.get("kv_lora_rank")
    if is_said and head_dim not in VLLM_CPU_HEAD_DIMS:
        allowed = ", ".join(map(str, VLLM_CPU_HEAD_DIMS))
        found.append(f"head_dim is {head_dim}; vLLM's CPU backend serves only {allowed}.")
    architecture = str((config.get("architectures") or ["unknown"])[0])
    if architecture.startswith("Pruned") and architecture not in architectures():
        found.append(
            f"{architecture} loads in Transformers; the vLLM plugin serves {', '.join(sorted(architectures()))}."
        )
    found += _rounding_warnings(config, architecture)
    slow = "matrix products run slower than they could."
    if isinstance(hidden, int) and hidden % WIDTH_MULTIPLE:
        found.append(f"hidden_size is {hidden}, not a multiple of {WIDTH_MULTIPLE}: {slow}")
    ffn = [width for _, _, width in layer_widths(config)]
    for width, layers in off_multiples(ffn, WIDTH_MULTIPLE).items():
        where = f"{ffn_field(config)} of {named_layers(layers)}"
        found.append(f"{where} is {width}, not a multiple of {WIDTH_MULTIPLE}: {slow}")
    return tuple(found)


def _rounding_warnings(config: Mapping[str, Any], architecture: str) -> list[str]:
    """What vLLM on a CPU does not run of the formats of quantised weights."""
    found = [reason] if (reason := _why_not_int8(config, architecture)) else []
    rounding = config.get("quantization_config")
    if isinstance(rounding, Mapping) and rounding.get("format") == "pack-quantized" and _bits(rounding) == 8:
        found.append(
            "vLLM's CPU backend has no kernel for 8-bit weights with inputs that are not rounded (w8a16), and refuses "
            "them; there, export with --quantise w8a8-int8 or w4a16."
        )
    return found


def _bits(rounding: Mapping[str, Any]) -> int | None:
    """Of the weights, as compressed-tensors describes them; None where it does not say."""
    groups = rounding.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    return weights.get("num_bits") if isinstance(weights, Mapping) else None


def _why_not_int8(config: Mapping[str, Any], architecture: str) -> str:
    """Why vLLM on a CPU ends at the first request to an int8 model; empty where it does not."""
    rounding = config.get("quantization_config")
    layout = rounding.get("format") if isinstance(rounding, Mapping) else None
    if architecture not in ON_TRANSFORMERS or layout != "int-quantized":
        return ""
    return (
        f"vLLM runs {architecture} through Transformers' layers, which its int8 product on a CPU does not take "
        '("mat1 must be a 2D tensor"). Export with --target pruned.'
    )


def serve_command(
    folder: str | Path, extra_args: Sequence[str] = (), *, verify: bool = True, server: str = ""
) -> list[str]:
    """Return the command line that is ``vllm serve`` for a checkpoint (:mod:`pyprune.serving.launch` says why not it).

    What the server will not like is printed as warnings.

    Args:
        folder: the checkpoint, or a hub id, which is served by that name.
        extra_args: handed on as they are, such as ``--port 9000``; see :func:`servable`.
        verify: compare a pyprune checkpoint with its pruning.json first; without it a warning is printed.
        server: name by which the server's processes will know that this was done
            (:func:`pyprune.serving.checkpoints.verify_checkpoint`).

    Raises:
        MissingDependencyError, CheckpointError: see :func:`servable`.
    """
    return _command(servable(folder, extra_args, verify=verify, server=server), folder, extra_args, verify=verify)


def _command(checkpoint: Checkpoint, folder: str | Path, extra_args: Sequence[str], *, verify: bool) -> list[str]:
    """See :func:`serve_command`."""
    if not verify:
        warn(f"The files of {folder} were not verified.")
    for warning in serving_warnings(checkpoint.config):
        warn(warning)
    words = [sys.executable, "-m", "pyprune.serving.launch", "serve"]
    if os.path.isdir(folder):  # as it was given: vLLM calls the model by these words, such as pruned/ or ./pruned
        return [*words, str(folder), *extra_args]
    unnamed = given_options(extra_args).served_model_name is None
    return [*words, str(checkpoint.folder), *extra_args, *(["--served-model-name", str(folder)] if unnamed else [])]


def servable(
    folder: str | Path, extra_args: Sequence[str] = (), *, verify: bool = True, server: str = ""
) -> Checkpoint:
    """Read a checkpoint, and refuse one that ``vllm serve`` would not serve with these options.

    Args:
        folder: the checkpoint, or a hub id.
        extra_args: of ``vllm serve``, the file of ``--config`` among them. ``--revision``, ``--download-dir`` and
            ``--hf-token`` say what is downloaded of a hub id, ``--tensor-parallel-size`` what divides the layers.
        verify: compare a pyprune checkpoint with its pruning.json first.
        server: see :func:`serve_command`.

    Raises:
        MissingDependencyError: vLLM is not installed.
        CheckpointError: the folder is no checkpoint, was changed after it was written, has sizes per layer that nothing
            here reads, needs a plugin that VLLM_PLUGINS keeps away, has layers (or, in w4a16, groups of scales) that
            the ranks of tensor parallelism cannot share, or is for a vLLM on a CPU what that ends at (a pipeline of
            ranks without compilation, int8 in layers of Transformers).
    """
    if not vllm_installed():
        raise MissingDependencyError("vllm", "vllm", "Serving")
    checkpoint = read_checkpoint(folder, verify=verify, server=server, hub=hub_of(extra_args))
    if checkpoint.architecture.startswith("Pruned") and checkpoint.architecture not in architectures():
        raise CheckpointError(
            f"{folder} is a {checkpoint.architecture}, which the vLLM plugin does not serve "
            f"(it serves {', '.join(sorted(architectures()))}); load it with Transformers."
        )
    refuse_unread_sizes(checkpoint, folder)
    if checkpoint.architecture.startswith("Pruned") and (reason := why_not_loaded()):
        raise CheckpointError(f"{folder} is a {checkpoint.architecture}, which pyprune's plugin serves. {reason}")
    if reason := _why_not_run(checkpoint, given_options(extra_args), vllm_version()):
        raise CheckpointError(f"{folder} cannot be served: {reason}")
    return checkpoint


def _why_not_run(checkpoint: Checkpoint, given: argparse.Namespace, version: str) -> str:
    """What a rank of vLLM would die of, or the server at its first request; empty where that is nothing known."""
    widths, ranks = layer_widths(checkpoint.config), given.tensor_parallel_size
    # vLLM itself would end a stock architecture in an assertion of a rank.
    reason = why_not_unequal_heads(widths, version) or why_not_split(widths, ranks)
    reason = reason or _why_not_in_stages(widths, given.pipeline_parallel_size)
    if _is_model_of_text(_draft_config(given)):
        reason = reason or why_not_draft_in_pipeline(given.pipeline_parallel_size)
    if given.uncompiled and os.environ.get(RUNNER) != "1":
        reason = reason or why_not_uncompiled_pipeline(given.pipeline_parallel_size, version)
    if is_tried_cpu_build(version):
        reason = reason or _why_not_int8(checkpoint.config, checkpoint.architecture)
    group = scale_group(checkpoint.config)
    return reason or why_not_grouped(widths, head_channels(checkpoint.config), group, ranks)


def _why_not_in_stages(widths: Sequence[LayerSizes], ranks: int) -> str:
    """See :func:`pyprune.serving.widths.why_not_staged`; of a division that vLLM refuses, it says why itself."""
    partition = os.environ.get(PARTITION, "")
    stages = stages_of(len(widths), ranks, partition)
    asked = [part.strip() for part in partition.split(",")]
    if not widths or (partition and asked != [str(end - start) for start, end in stages]):
        return ""
    return why_not_staged(widths, stages)


def hub_of(extra_args: Sequence[str]) -> Hub:
    """What these options of ``vllm serve`` say is downloaded of a hub id."""
    given = given_options(extra_args)
    return Hub(given.revision, given.download_dir, given.hf_token, given.trust_remote_code)


class _Parser(argparse.ArgumentParser):
    """Knows some of vLLM's options; what is wrong is an exception, also where a short name could be several."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def given_options(arguments: Sequence[str]) -> argparse.Namespace:
    """What of ``vllm serve``'s options decides here; all others are vLLM's to read.

    A name may be cut short, as in vLLM, which refuses what could be several of its options.

    Args:
        arguments: of the command line; the file of ``--config`` is read as well.

    Returns:
        The options by their long names, and "uncompiled": whether one of those is given that switch compilation off (on
        a CPU adapters do), and none that says more of it than a level.
    """
    parser = _Parser(add_help=False, exit_on_error=False)
    parser.add_argument("--revision")
    parser.add_argument("--served-model-name")
    parser.add_argument("--download-dir")
    parser.add_argument("--hf-token", nargs="?", const=True)
    parser.add_argument("--kv-cache-memory-bytes")
    parser.add_argument("--gpu-memory-utilization", "--device-memory-utilization")
    parser.add_argument("--max-model-len")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--dtype")
    parser.add_argument("--optimization-level", "-O")
    parser.add_argument("--speculative-config", "-sc")
    parser.add_argument("--spec-model", "--speculative-config.model", "-sc.model")
    for switch in ("enforce-eager", "enable-lora", "trust-remote-code"):
        parser.add_argument(f"--{switch}", action=argparse.BooleanOptionalAction, default=False)
    for name, short in (("tensor", "-tp"), ("pipeline", "-pp"), ("data", "-dp")):
        parser.add_argument(f"--{name}-parallel-size", short, type=int, default=1)
    # As in vLLM: what the file holds stands before the options, which replace it.
    words = [*words_of_file(arguments), *dashed_words(arguments)]
    try:
        given = parser.parse_known_args(words)[0]
    except argparse.ArgumentError:
        given = parser.parse_args([])  # vLLM says what is wrong with it
    is_off = given.enforce_eager or given.enable_lora or given.optimization_level == "0"
    given.uncompiled = is_off and not any(word.startswith(("-cc", "--compilation-config")) for word in words)
    return given


def dashed_words(arguments: Sequence[str]) -> list[str]:
    """The words of a command line of ``vllm serve`` with the names of options as its help writes them."""
    return [_dashed(argument) for argument in arguments]


def words_of_file(arguments: Sequence[str]) -> list[str]:
    """What the file of ``--config`` stands for; vLLM reads it where the option is a word by itself."""
    words = list(arguments)
    place = words.index("--config") + 1 if "--config" in words else 0
    return _of_file(words[place]) if 0 < place < len(words) else []


def _of_file(path: str) -> list[str]:
    """The options in the file of vLLM's ``--config``; nothing of one that vLLM will refuse."""
    try:
        values = yaml.safe_load(read_bounded(Path(path)))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    if not isinstance(values, dict):
        return []
    words: list[str] = []
    for name, value in values.items():
        first = value[0] if isinstance(value, list) and value else value
        first = json.dumps(first, default=str) if isinstance(first, dict) else first
        if first is True:
            words.append(_dashed(f"--{name}"))
        elif isinstance(first, (str, int, float)) and first is not False:
            words += [_dashed(f"--{name}"), str(first)]
    return words


def _dashed(argument: str) -> str:
    """An option as its help writes it: vLLM reads underscores as well."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def serve(folder: str | Path, extra_args: Sequence[str] = (), *, verify: bool = True) -> NoReturn:
    """Replace this process by one that waits for ``vllm serve folder extra_args...``.

    Args:
        folder: the checkpoint.
        extra_args: handed on as they are.
        verify: whether this process and the server's compare a pyprune checkpoint with its pruning.json.

    Raises:
        MissingDependencyError: vLLM is not installed.
        CheckpointError: the folder cannot be served.
    """
    from pyprune.checkpoint.verify import SERVER, VERIFY, current_server, new_server

    server = current_server() or new_server()
    checkpoint = servable(folder, extra_args, verify=verify, server=server)
    command = _command(checkpoint, folder, extra_args, verify=verify)
    given = given_options(extra_args)
    environment = {**_cache_environment(checkpoint, given), **engine_environment(), SERVER: server}
    if not verify:
        environment[VERIFY] = "0"
    os.execve(command[0], command, environment)  # noqa: S606  (an argument list, no shell)


def _cache_environment(checkpoint: Checkpoint, given: argparse.Namespace) -> dict[str, str]:
    """What sizes the cache on a CPU where the user does not: room for one sequence of the longest context at least.

    That is in the model and in its draft; vLLM refuses to start with less. On a CPU the variable replaces both of its
    options; each rank has so much.
    """
    sized = given.kv_cache_memory_bytes is not None or given.gpu_memory_utilization is not None
    if sized or KV_CACHE_SPACE in os.environ:
        return {}
    config = checkpoint.config
    context = context_tokens(given.max_model_len, _usual_context(config))
    blocks = 1 + -(-context // KV_BLOCK_TOKENS)  # vLLM keeps one to itself
    stages = stages_of(len(layer_widths(config)), given.pipeline_parallel_size, os.environ.get(PARTITION, ""))
    tokens = [_rank_token_bytes(config, given, stage) for stage in stages]
    tokens[-1] += _rank_token_bytes(_draft_config(given), given)  # all of it is on the last rank
    token = max(tokens)
    needed = -(-blocks * KV_BLOCK_TOKENS * token // 2**30)
    if needed > SERVE_KV_CACHE_GIB and is_cpu_build(vllm_version()):
        say(
            f"Key-value cache: {needed} GiB, for one sequence of {context:,} tokens. --max-model-len makes it smaller, "
            f"{KV_CACHE_SPACE} sets it (GiB)."
        )
    return {KV_CACHE_SPACE: str(max(SERVE_KV_CACHE_GIB, needed))}


def _rank_token_bytes(
    config: Mapping[str, Any], given: argparse.Namespace, stage: tuple[int, int] | None = None
) -> int:
    """Bytes of cache that one token takes in the KV heads of all layers that one tensor parallel rank has.

    Of the layers of a stage alone, where one is given. 0 where vLLM alone knows: windows, latents, other dtypes.
    """
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    is_windowed = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    if kinds or is_windowed or config.get("kv_lora_rank") or given.kv_cache_dtype not in (None, "auto"):
        return 0
    dtype = "float32" if given.dtype in ("float32", "float") else "bfloat16"
    shared = max(1, given.tensor_parallel_size)  # ranks have KV heads of their own, or the same ones
    widths = layer_widths(config)[slice(*stage) if stage else slice(None)]
    layers = [(heads, -(-kv_heads // shared), ffn) for heads, kv_heads, ffn in widths]
    return token_bytes_of(layers, head_channels(config), dtype)


def _draft_config(given: argparse.Namespace) -> Mapping[str, Any]:
    """config.json of the draft that vLLM's options name; empty without one in a local folder."""
    try:
        draft = given.spec_model or parse_json(given.speculative_config or "{}")["model"]
        config = read_json(Path(draft) / "config.json")
    except (KeyError, OSError, TypeError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _is_model_of_text(config: Mapping[str, Any]) -> bool:
    """Whether a draft's config.json is of a model of its own, of a family here: heads such as EAGLE's are others."""
    return str(config.get("model_type")).removeprefix("pruned_") in all_families()


def _usual_context(config: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence that vLLM takes where no length is given; 0 where config.json names none.

    With longrope that is the length before the scaling, though more may be asked for.
    """
    kind, _ = rotary_scaling(config)
    if kind in ("longrope", "su"):
        return int(config.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 0)
    return scaled_positions(config)


def context_tokens(given: str | None, usual: int) -> int:
    """Tokens of the longest sequence; 0 where vLLM itself finds out what fits, or nothing is known.

    Args:
        given: vLLM's --max-model-len: a number, with k or m (thousands, millions) or K or M (powers of two), or auto.
        usual: where it is not given.
    """
    if given is None:
        return usual
    number = _TOKENS.fullmatch(given.strip())
    if number is None:
        return 0
    tokens = float(number[1]) if "." in number[1] else int(number[1])
    return int(tokens * _SUFFIXES[number[2]])
