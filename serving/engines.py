"""The parent's side of an inference engine in a child process (see :mod:`pyprune.serving.speed.worker`)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, Self, cast

from pyprune.errors import ConfigError, MissingDependencyError, PypruneError, did_you_mean, install_command
from pyprune.runtime.interrupts import interrupts_deferred
from pyprune.runtime.progress import say

EngineName = Literal["vllm", "transformers", "llamacpp"]
ENGINES = ("auto", "vllm", "transformers", "llamacpp")
GGUF_FORMAT = "q8_0"
"""Format in which a checkpoint folder is written for llama.cpp: the most usual one, nearly without loss."""
LOAD_TIMEOUT_S = 900.0
COMMAND_TIMEOUT_S = 3600.0
LOG_TIMEOUT_S = 10.0
LOG_LINES = 15
SETTLE_S = 1.5
"""vLLM's workers poll for one second after their last request; the next engine's turn starts after that."""
PROCESS_BYTES = {"vllm": 3 * 2**30, "transformers": 3 * 2**30, "llamacpp": 2**29}
"""Memory of an engine's processes in addition to weights and cache (measured on the CPU, rounded up)."""


class EngineError(PypruneError):
    """An inference engine failed to start or died; the message ends with the last lines of its log."""


def vllm_installed() -> bool:
    """Return whether vLLM can be imported, without importing it."""
    return importlib.util.find_spec("vllm") is not None


def choose_engine(engine: str) -> tuple[EngineName, str | None]:
    """Turn one of :data:`ENGINES` into an engine and, for ``auto``, a note on why it is not vLLM.

    Raises:
        ConfigError: another name.
        MissingDependencyError: the engine that was named is not installed.
    """
    if engine not in ENGINES:
        raise ConfigError(did_you_mean(engine, ENGINES, "engine"))
    if engine == "transformers":
        return "transformers", None
    if engine == "llamacpp":
        for package in ("xllamacpp", "gguf"):
            if importlib.util.find_spec(package) is None:
                raise MissingDependencyError(package, "gguf", "Measuring with --engine llamacpp")
        return "llamacpp", None
    if vllm_installed():
        return "vllm", None
    if engine == "vllm":
        raise MissingDependencyError("vllm", "vllm", "Measuring with --engine vllm")
    return "transformers", (
        "vLLM is not installed, so plain Transformers was measured: slower in absolute terms, and its ratios "
        f"can differ from a server's. Install it with: {install_command('vllm')}"
    )


MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TOP_PAD_": str(2**26)}
"""Variables that let glibc keep the memory of activations between steps. By default glibc returns some and requests it
again: 4,000 to 25,000 page faults for a prompt of 2,048 tokens (SmolLM2-135M, vLLM in bfloat16 on a CPU), 2 to 7 with
these variables. The turns took 1.29 s and 1.20 s, and processes of one model differed."""


PYTHON = (sys.executable, "-P")
"""The start of a command that runs a module of this package. With -m alone, Python would first import from the current
folder, which may be a downloaded model's."""

KV_CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""Environment variable by which vLLM on a CPU sizes its key-value cache (GiB), whatever its options say."""


def engine_environment() -> dict[str, str]:
    """Return the environment of an engine process; the user's variables are kept.

    vLLM binds its OpenMP threads, and keeps one core free for its scheduler, which polls. On two cores (SmolLM2-135M,
    bfloat16) giving that core to the threads as well halved generation, from 485 to 240 tokens/s; prompt processing
    went from 4.3 s to 2.9 s. VLLM_CPU_OMP_THREADS_BIND changes it.
    """
    ours = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false", **MALLOC}
    return {**ours, **os.environ}


def measured_environment() -> dict[str, str]:
    """Return :func:`engine_environment` without the variable that replaces the option for the size of the cache."""
    return {name: value for name, value in engine_environment().items() if name != KV_CACHE_SPACE}


class ModelProcess(ABC):
    """A process that runs one model, in a group with everything that it started, until it is closed.

    Use it as a context manager: leaving the block ends the group.

    Args:
        command: that starts it.
        kind: of process, in the name of its log.
        model: its name, for messages.
        environment: of the process.
        cwd: folder that it is started in; None = this process's.
        has_pipes: whether its stdin and stdout are pipes; otherwise it prints to the log alone.
    """

    stop_s = 30.0
    """Seconds until it is killed after it was asked to end."""

    def __init__(
        self,
        command: Sequence[str],
        kind: str,
        model: str,
        environment: Mapping[str, str],
        *,
        cwd: Path | None = None,
        has_pipes: bool = False,
    ) -> None:
        self.model = model
        self._log = tempfile.NamedTemporaryFile(prefix=f"pyprune-{kind}-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if has_pipes else self._log,
            stderr=self._log,
            text=True,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )

    def cpu_seconds(self) -> float:
        """Return the CPU time that the process and its living descendants have used (0 without /proc)."""
        return group_cpu_seconds(self._process.pid)

    def peak_memory_bytes(self) -> int:
        """Return the most memory of every living process, summed, shared pages in each (0 without /proc)."""
        return group_peak_bytes(self._process.pid)

    def error(self, what: str) -> EngineError:
        """Return the error for an event at the process, a sentence without its full stop, with the end of its log."""
        return engine_error(what, Path(self._log.name))

    @abstractmethod
    def ask_to_end(self) -> None:
        """Let the process end while others do; :meth:`close` waits for it."""

    def close(self) -> None:
        """End the group; safe to call twice. A second Ctrl-C waits, or processes would be left behind."""
        with interrupts_deferred():
            self.ask_to_end()
            end_group(self._process, self.stop_s)
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Engine(ModelProcess):
    """One model in one engine in a child process, kept alive between commands.

    Args:
        engine: vllm, transformers or llamacpp.
        options: those of :class:`pyprune.serving.speed.worker.VllmRunner`; ``model`` is the checkpoint folder, for
            llamacpp a GGUF file.

    Attributes:
        device: name of the accelerator, None on the CPU.
        build: what the engine was compiled for (llama.cpp: its instruction sets); None if unknown.
        load_seconds: from the start of the process until the model was ready.

    Raises:
        EngineError: the model did not load.
    """

    stop_s = 15.0

    def __init__(self, engine: EngineName, options: Mapping[str, Any]) -> None:
        self.engine = engine
        started = time.perf_counter()
        command = [*PYTHON, "-m", "pyprune.serving.speed.worker"]
        super().__init__(command, "engine", str(options["model"]), measured_environment(), has_pipes=True)
        # Popen types its pipes as optional; both were requested.
        self._stdin = cast(IO[str], self._process.stdin)
        self._stdout = cast(IO[str], self._process.stdout)
        try:
            loaded = self._ask(LOAD_TIMEOUT_S, op="load", engine=engine, **options)
        except BaseException:
            self.close()
            raise
        self.device: str | None = loaded["device"]
        self.build: str | None = loaded["build"]
        self.load_seconds = time.perf_counter() - started

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, int]:
        """Generate greedily, ignoring the end of sentence; return (seconds, tokens generated).

        Args:
            prompts: token ids of each prompt.
            new_tokens: tokens to generate for each of them.

        Raises:
            EngineError: the engine died, or generated another number of tokens than requested.
        """
        reply = self._ask(COMMAND_TIMEOUT_S, op="generate", prompts=prompts, new_tokens=new_tokens)
        expected = len(prompts) * new_tokens
        if reply["tokens"] != expected:
            raise self._error(f"generated {reply['tokens']} tokens where {expected} were requested")
        return float(reply["seconds"]), int(reply["tokens"])

    def ask_to_end(self) -> None:
        """See :meth:`ModelProcess.ask_to_end`."""
        with contextlib.suppress(OSError, ValueError):
            self._stdin.close()

    def _ask(self, timeout: float, **command: Any) -> dict[str, Any]:
        try:
            self._stdin.write(json.dumps(command) + "\n")
            self._stdin.flush()
        except OSError:
            raise self._error("ended unexpectedly") from None
        ready, _, _ = select.select([self._stdout], [], [], timeout)
        if not ready:
            raise self._error(f"gave no answer to {command['op']!r} within {timeout:.0f} s")
        line = self._stdout.readline()
        if not line:
            raise self._error(f"ended during {command['op']!r}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            self._end_for_its_log()
            raise self._error(f"failed during {command['op']!r}: {reply['error'].rstrip('.')}")
        return reply

    def _end_for_its_log(self) -> None:
        """Let the process end, because llama.cpp prints from a thread that may be behind the reply."""
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LOG_TIMEOUT_S)

    def _error(self, event: str) -> EngineError:
        return self.error(f"The {self.engine} engine for {self.model} {event}")


def let_settle(waiting: int, engine: str = "vllm") -> None:
    """Wait until vLLM's other engines are idle, before a turn is timed.

    Args:
        waiting: the number of other engines or servers.
        engine: of all of them; only vLLM's poll.
    """
    if waiting and engine.startswith("vllm"):
        time.sleep(SETTLE_S)


def engine_bytes(engine: EngineName, weights: int, cache: int) -> int:
    """Predict the memory of an engine in bytes, from the bytes of its weights (loaded twice at its start) and cache."""
    return PROCESS_BYTES[engine] + 2 * weights + cache


def engine_error(event: str, log: Path) -> EngineError:
    """Return the error for an event in a process, with the last lines of its log.

    Args:
        event: a sentence without its full stop.
        log: file with everything that the process printed.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    tail = "\n".join(f"    {line}" for line in lines[-LOG_LINES:]) or "    (it wrote nothing)"
    return EngineError(f"{event}. Its last log lines:\n{tail}")


@contextlib.contextmanager
def as_gguf(model: str, quantise: str) -> Iterator[str]:
    """Give the GGUF file of a model: the file itself, or a temporary one that is written, which is printed.

    Args:
        model: GGUF file, checkpoint folder or hub id.
        quantise: format in which a folder is written.

    Raises:
        CheckpointError, ConfigError, MissingDependencyError, UnsupportedModelError: see
            :func:`pyprune.serving.gguf.write.export_gguf`; a GGUF file is checked as far as its header goes.
    """
    from pyprune.serving.checkpoints import is_gguf, read_gguf
    from pyprune.serving.gguf.write import export_gguf

    if is_gguf(model):
        read_gguf(Path(model))
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="pyprune-gguf-") as folder:
        say(f"{model}: writing {quantise} for llama.cpp")
        written = export_gguf(model, Path(folder) / "model.gguf", quantise=quantise)
        for note in written.notes:
            say(note)
        yield str(written.path)


def end_group(process: subprocess.Popen[Any], patience: float) -> None:
    """Wait for a process that was asked to end, then kill it and everything that it started.

    Args:
        process: started with ``start_new_session``, so that its group holds nothing else.
        patience: seconds until it is killed.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=patience)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def group_cpu_seconds(group: int) -> float:
    """Return the CPU time in seconds that the living processes of a process group have used (0 without /proc)."""
    # Field 0 is the state; user and system time are 11 and 12.
    ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in _processes(group))
    return ticks / os.sysconf("SC_CLK_TCK")


def group_peak_bytes(group: int) -> int:
    """Return the sum of the most bytes that each living process of a group held (0 without /proc)."""
    total = 0
    for folder, _ in _processes(group):
        with contextlib.suppress(OSError):
            status = (folder / "status").read_text(errors="replace")
            total += sum(1024 * int(size) for size in re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE))
    return total


def _processes(group: int) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folder in /proc of every process of a group, and the fields of its ``stat`` from the state on."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text(errors="replace")  # names are cut at 15 bytes, also inside a character
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()  # the command name may hold spaces
        if int(fields[2]) == group:
            yield folder, fields
