"""Compare the speed of a pruned model with its dense one: interleaved turns after a warm-up, every sample kept.

Two columns, as in the papers (after Song et al., 2024): token generation (a batch of prompts, a fixed number of new
tokens each, in tokens/s) and prompt processing (one long prompt, one new token, latency in ms).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pyprune.errors import ConfigError
from pyprune.runtime.host import available_memory
from pyprune.runtime.progress import say
from pyprune.serving.checkpoints import Checkpoint, is_gguf, read_checkpoint, read_gguf, refuse_unread_sizes
from pyprune.serving.comparison import Comparison, check_models, length_problems
from pyprune.serving.engines import (
    GGUF_FORMAT,
    Engine,
    EngineName,
    as_gguf,
    choose_engine,
    engine_bytes,
    measured_environment,
)
from pyprune.serving.speed.results import (
    COLUMNS,
    SHORT_PROMPT_TOKENS,
    Column,
    MeasuredModel,
    Sample,
    SpeedReport,
    Workload,
)
from pyprune.serving.stats import environment_record, median
from pyprune.serving.widths import KV_BLOCK_TOKENS, head_channels

DTYPE = Workload.dtype


def measure(
    models: Mapping[str, str | Path],
    *,
    engine: str = "auto",
    batch_size: int = 64,
    new_tokens: int = 128,
    prompt_tokens: int | None = None,
    repeats: int = 3,
    precision: float = 0.0,
    max_repeats: int | None = None,
    dtype: str = DTYPE,
    quantise: str | None = None,
    seed: int = 0,
    jsonl: Path | None = None,
    gguf_files: Mapping[str, str] | None = None,
) -> SpeedReport:
    """Time token generation and prompt processing of several models side by side.

    Turns are interleaved (A, B, A, B, ...), so that a drift of the machine hits every model alike. Each model runs
    in its own process; prefix caching is off, prompts are random token ids, different in every repeat and the same
    for every model. After one warm-up turn of each column, every sample is kept.

    Args:
        models: name -> checkpoint folder or hub id, with llamacpp also a GGUF file; the first is the baseline.
        engine: auto (vLLM if installed, else Transformers), vllm, transformers or llamacpp.
        batch_size: prompts in a generation request.
        new_tokens: tokens generated for each.
        prompt_tokens: length of the prompt-processing prompt, in tokens; None = 2,048, or as many as all models read.
        repeats: timed turns of each model and column; with ``precision`` the least number.
        precision: take turns of a column until the 95 % interval of every model's ratio to the first one is no wider
            than this share of it (0.02 = 2 %); 0 = exactly ``repeats`` turns.
        max_repeats: the most turns of a column with ``precision``; None = 10, or ``repeats`` where that is more.
        dtype: bfloat16, float16 or float32; not with llamacpp.
        quantise: with llamacpp, the GGUF format in which folders are written for the run, to a temporary folder; None =
            q8_0. A GGUF file is taken as it is.
        seed: of the prompts.
        jsonl: file to which every sample is appended at once, with the environment.
        gguf_files: with llamacpp, name -> GGUF file that the model was written to before; the others are written here.

    Raises:
        ConfigError: an invalid option, no model, or a workload longer than a model's context.
        CheckpointError: a folder that is no checkpoint, or a damaged GGUF file.
        UnsupportedModelError: llama.cpp has no architecture for a model.
        MissingDependencyError: the engine that was named is not installed.
        EngineError: an engine failed; its last log lines are in the message.
    """
    workload = workload_of(
        models,
        engine=engine,
        quantise=quantise,
        prompt_tokens=prompt_tokens,
        batch_size=batch_size,
        new_tokens=new_tokens,
        repeats=repeats,
        dtype=dtype,
        seed=seed,
        precision=precision,
        max_repeats=max_repeats,
    )
    chosen, note = choose_engine(engine)
    if note:
        say(note, "yellow")
    if prompt_tokens is None and workload.prompt_tokens != Workload.prompt_tokens:
        say(f"The prompt has {workload.prompt_tokens} tokens: the models read no more with the one that is generated.")
    with ExitStack() as files:
        opened = {
            name: _open(chosen, source, (gguf_files or {}).get(name), quantise or GGUF_FORMAT, files)
            for name, source in models.items()
        }
        run = _Run(chosen, workload, opened, jsonl)
        run.take(f"timing with {chosen}")
        return run.report(note)


def workload_of(
    models: Mapping[str, str | Path],
    *,
    engine: str = "auto",
    quantise: str | None = None,
    prompt_tokens: int | None = None,
    **options: Any,
) -> Workload:
    """Return what is timed, after checking that these models can be; only their sizes are read.

    Args:
        models: as in :func:`measure`, like ``engine``, ``quantise`` and ``prompt_tokens``.
        options: the other fields of :class:`Workload`.

    Raises:
        ConfigError, CheckpointError, MissingDependencyError: as :func:`measure`.
    """
    workload = Workload(**options) if prompt_tokens is None else Workload(prompt_tokens=prompt_tokens, **options)
    workload.validate()
    check_models(models)
    chosen, _ = choose_engine(engine)
    _check_format(chosen, workload.dtype, quantise)
    limits = {name: _max_length(chosen, source) for name, source in models.items()}
    shortest = min((limit for limit in limits.values() if limit is not None), default=workload.max_length)
    if prompt_tokens is None and 1 < shortest <= workload.prompt_tokens:
        workload = replace(workload, prompt_tokens=shortest - 1)  # one token is generated
    w = workload
    if problems := length_problems(limits, w.max_length, "workload", w.prompt_tokens, w.new_tokens):
        raise ConfigError(problems)
    return workload


def _max_length(engine: EngineName, source: str | Path) -> int | None:
    if engine == "llamacpp" and is_gguf(source):
        return read_gguf(Path(source)).max_length
    checkpoint = read_checkpoint(source, verify=False)
    if engine == "llamacpp":  # the length in the file that will be written
        from pyprune.serving.gguf.layout import open_model
        from pyprune.serving.gguf.metadata import context_length

        model = open_model(checkpoint.folder)
        return context_length(model.config, model.form)[0]
    refuse_unread_sizes(checkpoint, source)
    return checkpoint.max_length


@dataclass(frozen=True)
class _Source:
    """A model to measure: the source that was named, and the checkpoint that the engine loads."""

    source: Path
    checkpoint: Checkpoint


def _check_format(engine: EngineName, dtype: str, quantise: str | None) -> None:
    if engine == "llamacpp" and dtype != DTYPE:
        raise ConfigError(f"dtype is {dtype}, but llama.cpp takes formats of GGUF files; set quantise instead.")
    if engine != "llamacpp" and quantise is not None:
        raise ConfigError(f"quantise is {quantise}, which belongs to the engine llamacpp; for {engine} set dtype.")
    if engine == "llamacpp":
        from pyprune.serving.gguf.write import check_gguf_format

        check_gguf_format(quantise or GGUF_FORMAT)


def _open(engine: EngineName, source: str | Path, written: str | None, quantise: str, files: ExitStack) -> _Source:
    """Read a model's sizes; for llama.cpp those of its GGUF file, which is written first if it does not exist."""
    if engine == "llamacpp" and is_gguf(source):
        return _Source(Path(source), read_gguf(Path(source)))
    checkpoint = read_checkpoint(source)
    if engine != "llamacpp":
        return _Source(checkpoint.folder, checkpoint)
    file = written or files.enter_context(as_gguf(str(source), quantise))
    return _Source(checkpoint.folder, replace(read_gguf(Path(file)), parameters=checkpoint.parameters))


class _Run(Comparison):
    """State of one measurement: the engines, and the samples so far."""

    def __init__(self, engine: EngineName, workload: Workload, models: dict[str, _Source], jsonl: Path | None) -> None:
        checkpoints = [model.checkpoint for model in models.values()]
        resident = len(models) == 1 or fits_in_memory(engine, checkpoints, workload)
        if not resident:
            say("One engine at a time, because of memory: each turn loads its own.")
        environment = environment_record(variables=measured_environment())
        super().__init__(engine, "engines", jsonl, environment, models, resident=resident)
        self.name, self.workload, self.models = engine, workload, models
        self.vocab_size = min(checkpoint.vocab_size for checkpoint in checkpoints)

    def plan(self) -> Iterator[tuple[Column, int, str]]:
        """Yield column by column, repeat by repeat, model by model."""
        for column in COLUMNS:
            for repeat in self.workload.rounds(self.report, [column]):
                for name in self.models:
                    yield column, repeat, name

    def turn(self, column: Column, repeat: int, name: str) -> Sample:
        """Time one request."""
        prompts = self.workload.prompts(column, repeat, self.vocab_size)
        new_tokens = self.workload.new_tokens_of(column)
        (seconds, tokens), _, idle = self.measure(name, lambda engine: engine.generate(prompts, new_tokens))
        if column == "prompt":
            tokens = self.workload.prompt_tokens
        return Sample(name, column, repeat, len(self.turns), seconds, tokens, idle)

    def facts(self, turn: Sample) -> dict[str, Any]:
        """See :meth:`Comparison.facts`."""
        return {"checkpoint": asdict(self._model(turn.model)), "workload": asdict(self.workload)}

    def start(self, name: str) -> Engine:
        """Load a model and take one warm-up turn of each column."""
        workload, checkpoint = self.workload, self.models[name].checkpoint
        options = {
            "model": str(checkpoint.folder),
            "dtype": workload.dtype,
            "seed": workload.seed,
            "max_length": workload.max_length,
            "max_sequences": workload.batch_size,
            "kv_cache_bytes": kv_cache_bytes(checkpoint.config, workload),
        }
        engine = Engine(self.name, options)
        try:
            for column in COLUMNS:
                prompts = workload.prompts(column, -1, self.vocab_size)
                engine.generate(prompts, workload.new_tokens_of(column))
        except BaseException:
            engine.close()
            raise
        reported = {"device": engine.device, "engine_build": engine.build}
        self.environment |= {key: value for key, value in reported.items() if value}
        return engine

    def _model(self, name: str) -> MeasuredModel:
        model = self.models[name]
        c, loads = model.checkpoint, self.load_seconds[name]
        sizes = (c.architecture, c.parameters, c.bytes, c.format or self.workload.dtype)
        return MeasuredModel(str(model.source), *sizes, median(loads) if loads else None, self.memory.get(name) or None)

    def report(self, note: str | None = None) -> SpeedReport:
        """Return the report, with a warning when a waiting engine was not idle."""
        warning = self.distrust_warning(s.idle_cpu_seconds / s.seconds for s in self.turns)
        note = " ".join(filter(None, (note, warning))) or None
        models = {name: self._model(name) for name in self.models}
        return SpeedReport(self.engine, note, self.workload, models, tuple(self.turns), self.environment)


def kv_cache_bytes(config: Mapping[str, Any], workload: Workload) -> int:
    """Return the bytes of key-value cache that hold the whole workload, with a quarter to spare.

    Args:
        config: config.json as plain data. Layers that were made narrower are counted at full width.
        workload: decides the number and length of the sequences.
    """
    generation = workload.batch_size, SHORT_PROMPT_TOKENS + workload.new_tokens
    prompt = 1, workload.prompt_tokens + 1
    return max(sequence_bytes(config, *each, workload.dtype) for each in (generation, prompt))


def sequence_bytes(config: Mapping[str, Any], sequences: int, tokens: int, dtype: str) -> int:
    """Return the bytes of key-value cache that hold a number of sequences of a length, with a quarter to spare.

    Args:
        config: see :func:`kv_cache_bytes`.
        sequences: at a time.
        tokens: of each.
        dtype: of the cache.
    """
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    item = 4 if dtype == "float32" else 2
    token_bytes = 2 * config["num_hidden_layers"] * heads * head_channels(config) * item
    needed = sequences * -(-tokens // KV_BLOCK_TOKENS) + 2
    return max(64 * 2**20, int(1.25 * needed * KV_BLOCK_TOKENS * token_bytes))


def fills_gpu(engine: EngineName) -> bool:
    """Check whether an engine runs on a GPU here. vLLM always takes its share of one, so that only one engine fits."""
    import torch

    return engine != "llamacpp" and torch.cuda.is_available()


def fits_in_memory(engine: EngineName, checkpoints: Iterable[Checkpoint], workload: Workload) -> bool:
    """Check whether the engines of all checkpoints may be loaded at once."""
    if fills_gpu(engine):
        return False
    needs = (engine_bytes(engine, c.bytes, kv_cache_bytes(c.config, workload)) for c in checkpoints)
    return sum(needs) < available_memory()
