"""Options of a measurement of servers: the load, the lengths, the service level, and the options of the servers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pyprune.errors import ConfigError, did_you_mean, shown
from pyprune.serving.comparison import TurnOptions
from pyprune.serving.vllm.options import dashed_words, words_of_file

SLO_METRICS = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el"}
"""Time that a service level can limit for each request: its name in vLLM. They are the time to the first token, the
mean time of the tokens after it, and the time from end to end."""
LEAST_REQUESTS = 8
LENGTH_SLACK = 16
"""Tokens by which a prompt may come out longer than asked: vLLM makes it as text, and the server reads it again."""


SET_ITSELF = "which the measurement sets itself; {}."
UNREACHED = "with which the measurement's client does not reach the server; leave it out."
ALWAYS_SET = {
    "--dtype": "use --dtype of `pyprune bench`",
    "--seed": "use --seed of `pyprune bench`",
    "--kv-cache-memory-bytes": "use --kv-gib of `pyprune bench`",
    "--enable-prefix-caching": "leave it out",  # loads of one turn have the same prompts
    "--host": "leave it out",
    "--port": "leave it out",
}
"""Option of ``vllm serve`` that a measurement always sets, which replaces that of a file: the way out."""
REFUSED = {
    "--enforce-eager": SET_ITSELF.format("use --eager of `pyprune bench`"),
    "--num-gpu-blocks-override": SET_ITSELF.format("use --kv-gib of `pyprune bench`"),
    "--served-model-name": SET_ITSELF.format("leave it out"),
    **dict.fromkeys(("--api-key", "--ssl-keyfile", "--ssl-certfile", "--uds"), UNREACHED),
    "--disable-log-stats": "with which /metrics counts nothing and no turn can be followed; leave it out.",
}
"""Option of ``vllm serve`` that is refused on the command line and in the file of --config: why."""
SECRETS = ("--hf-token", "--api-key")
"""Options of ``vllm serve`` whose values are never printed or stored."""
HIDDEN = "***"
NO_PREFIX_CACHING = "--no-enable-prefix-caching"


@dataclass(frozen=True)
class Load:
    """How requests come: a number of them at once, or a rate. One of the two is set.

    Attributes:
        concurrency: requests in flight; the next one is sent when one is answered.
        rate: requests per second on average, at random moments (a Poisson process), however many are in flight.
        prompt_tokens: length of their prompts where several lengths are swept; None = that of the options.
    """

    concurrency: int | None = None
    rate: float | None = None
    prompt_tokens: int | None = None

    def __str__(self) -> str:
        how = f"{self.concurrency} at once" if self.rate is None else f"{self.rate:.15g} requests/s"
        return how if self.prompt_tokens is None else f"{how}, prompts of {self.prompt_tokens}"

    @property
    def ratio_of(self) -> str:
        """Name the quantity of a model's ratio to the baseline: output tokens/s, unless a rate decides them."""
        return "output tokens/s" if self.rate is None else "inverse mean end-to-end time"

    @property
    def default_requests(self) -> int:
        """Return the default number of requests of one turn: two rounds, or ten seconds."""
        least = 2 * (self.concurrency or 0) if self.rate is None else math.ceil(10 * self.rate)
        return max(LEAST_REQUESTS, least)


DEFAULT_LOADS = (Load(1), Load(4), Load(16))


@dataclass(frozen=True)
class LoadOptions(TurnOptions):
    """The options of a measurement of servers.

    Attributes:
        prompt_tokens: length of every prompt (vLLM's dataset "random") of a load that names none.
        new_tokens: tokens generated for every prompt; the end of a text is ignored.
        loads: one after the other, for every model.
        requests: of one turn; None = :attr:`Load.default_requests`.
        slo: limits of a good request: a key of :data:`SLO_METRICS` -> milliseconds; {} = no goodput.
        eager: start servers with --enforce-eager; by default they compile, as `vllm serve` does.
        kv_gib: key-value cache of each server in GiB.
        vllm_args: further options of `vllm serve`, the same for every model.
    """

    prompt_tokens: int = 512
    new_tokens: int = 128
    loads: tuple[Load, ...] = DEFAULT_LOADS
    requests: int | None = None
    slo: Mapping[str, float] = field(default_factory=dict)
    eager: bool = False
    kv_gib: float = 1.0
    vllm_args: tuple[str, ...] = ()

    def problems(self, **counts: int) -> list[str]:
        """See :meth:`TurnOptions.problems`."""
        counts |= {"new_tokens": self.new_tokens, "prompt_tokens": min(self.prompts, default=self.prompt_tokens)}
        if self.requests is not None:
            counts["requests"] = self.requests
        problems = super().problems(**counts)
        if not 0 < self.kv_gib < math.inf:
            problems.append(f"kv_gib is {self.kv_gib:g}; it must be above 0 (GiB of key-value cache for each server).")
        most = max((load.concurrency or 0 for load in self.loads), default=0)
        if self.requests is not None and 1 <= self.requests < most:
            problems.append(f"requests is {self.requests}; {most} at once need at least as many.")
        if "tpot" in self.slo and self.new_tokens == 1:
            problems.append(
                "slo limits tpot, the time of the tokens after the first; new_tokens is 1, so there are none."
            )
        if not self.loads:
            problems.append("No load was given; name at least one concurrency or request rate.")
        return problems + owned_problems(self.vllm_args)

    def prompt_of(self, load: Load) -> int:
        """Length of the prompts of ``load`` in tokens."""
        return self.prompt_tokens if load.prompt_tokens is None else load.prompt_tokens

    @property
    def prompts(self) -> tuple[int, ...]:
        """Every length of prompts, in the order of the loads."""
        return tuple(dict.fromkeys(map(self.prompt_of, self.loads)))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that a server has to take."""
        return max(self.prompts) + self.new_tokens + LENGTH_SLACK

    @property
    def asked_of_vllm(self) -> tuple[str, ...]:
        """Return the chosen options of ``vllm serve``: ``vllm_args``, and vLLM's name of ``eager``."""
        return (*(("--enforce-eager",) if self.eager else ()), *self.vllm_args)

    @property
    def told_args(self) -> tuple[str, ...]:
        """``vllm_args`` as they may be shown and kept: without tokens and keys."""
        told: list[str] = []
        for word, before in zip(self.vllm_args, ("", *self.vllm_args), strict=False):
            name, equals, _ = word.partition("=")
            if equals and _is_secret(name):
                told.append(f"{name}={HIDDEN}")
            else:
                told.append(HIDDEN if _is_secret(before) and not word.startswith("-") else word)
        return tuple(told)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, with :attr:`told_args`."""
        return {**asdict(self), "loads": [str(load) for load in self.loads], "vllm_args": list(self.told_args)}

    @property
    def kv_bytes(self) -> int:
        """Key-value cache of each server in bytes."""
        return int(self.kv_gib * 2**30)

    def requests_of(self, load: Load) -> int:
        """Requests of one turn of ``load``."""
        return self.requests or load.default_requests


def _is_secret(name: str) -> bool:
    """Check for the name of one of :data:`SECRETS`, also with underscores or cut short."""
    return _whole_name(dashed_words([name])[0], SECRETS) is not None


def _whole_name(name: str, options: Iterable[str]) -> str | None:
    """Return the first of these options that has this name, also cut short; None without one."""
    return next((known for known in options if len(name) > len("--") and known.startswith(name)), None)


def owned_problems(vllm_args: Sequence[str]) -> list[str]:
    """Return an error for each option of ``vllm serve`` that would contradict the report.

    The options of the measurement replace those of the file of --config; its other options count.
    """
    whole = {option: SET_ITSELF.format(instead) for option, instead in ALWAYS_SET.items()} | REFUSED
    problems = []
    for words, refused in ((dashed_words(vllm_args), whole), (words_of_file(vllm_args), REFUSED)):
        for name in (word.partition("=")[0] for word in words):
            option = _whole_name(name.replace("--no-", "--", 1), refused)
            if option is not None and name != NO_PREFIX_CACHING:  # also cut short or negated
                problems.append(f"vllm_args holds {name}, {refused[option]}")
    return problems


def parse_loads(concurrency: str | None, request_rate: str | None) -> tuple[Load, ...]:
    """Read "1,4,16" as concurrencies or "0.5,2" as requests per second; the default loads for neither.

    Raises:
        ConfigError: both are given, or one holds something else than numbers above 0.
    """
    if concurrency is not None and request_rate is not None:
        raise ConfigError("--concurrency and --request-rate exclude each other: give the one that is to be swept.")
    if concurrency is not None:
        return tuple(Load(concurrency=int(number)) for number in _numbers(concurrency, "--concurrency", whole=True))
    if request_rate is not None:
        return tuple(Load(rate=number) for number in _numbers(request_rate, "--request-rate", whole=False))
    return DEFAULT_LOADS


def parse_prompts(text: str) -> tuple[int, ...]:
    """Read "128,2048" as lengths of prompts.

    Raises:
        ConfigError: one is no whole number above 0.
    """
    return tuple(int(number) for number in _numbers(text, "--prompt-tokens", whole=True))


def with_prompts(loads: Sequence[Load], prompts: Sequence[int]) -> tuple[Load, ...]:
    """Combine every load with every length of prompts; with one length, which the options name, return the loads."""
    if len(prompts) < 2:
        return tuple(loads)
    return tuple(replace(load, prompt_tokens=length) for length in prompts for load in loads)


def _numbers(text: str, option: str, *, whole: bool) -> list[float]:
    found = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        pattern = r"\d{1,9}" if whole else r"\d{1,9}(\.\d{1,9})?"
        if not re.fullmatch(pattern, part) or float(part) <= 0:
            what = "whole numbers of at least 1, such as 1,4,16" if whole else "numbers above 0, such as 0.5,2"
            raise ConfigError(f"{option} holds {shown(part)}; it takes {what}.")
        found.append(float(part))
    if not found:
        raise ConfigError(f"{option} is empty; give at least one number, or leave the option out.")
    return list(dict.fromkeys(found))


def parse_slo(text: str | None) -> dict[str, float]:
    """Read "ttft:500ms,tpot:0.05s" as milliseconds of each metric; nothing for None.

    Raises:
        ConfigError: an unknown metric, one that is named twice, or a value that is no time.
    """
    found: dict[str, float] = {}
    for part in (part.strip() for part in (text or "").split(",") if part.strip()):
        name, _, value = part.partition(":")
        if name not in SLO_METRICS:
            raise ConfigError(did_you_mean(name, SLO_METRICS, "metric of --slo"))
        if name in found:
            raise ConfigError(f"--slo limits {name} twice; give each metric once.")
        time = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s)", value)
        if time is None or float(time[1]) == 0:
            raise ConfigError(
                f"--slo holds {shown(part)}; a limit is a time above 0 with its unit, such as ttft:500ms."
            )
        found[name] = float(time[1]) * (1000 if time[2] == "s" else 1)
    if text is not None and not found:
        raise ConfigError("--slo is empty; give a limit such as ttft:500ms, or leave the option out.")
    return found
