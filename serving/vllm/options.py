"""Read the options of ``vllm serve`` that decide what pyprune checks, by vLLM's own rules."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pyprune.errors import CheckpointError
from pyprune.runtime.files import parse_json, read_bounded, read_json
from pyprune.serving.checkpoints import Hub, refuse_damaged

NO_COMPILATION = "TORCH_COMPILE_DISABLE"
"""Environment variable that switches compilation off where it is 1."""

_TEXTS = (
    *("--revision", "--served-model-name", "--download-dir", "--dtype", "--kv-cache-dtype", "--kv-cache-memory-bytes"),
    *("--gpu-memory-utilization --device-memory-utilization", "--max-model-len", "--max-num-batched-tokens"),
    *("--performance-mode", "--distributed-executor-backend", "--nnodes -n", "--compilation-config -cc"),
    *("--optimization-level -O", "--speculative-config -sc", "--spec-method", "--spec-model"),
)
"""Names of the options whose value is read as text."""
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)")
_SUFFIXES = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}


def given_options(arguments: Sequence[str], *, with_file: bool = True) -> argparse.Namespace:
    """Read the options that pyprune needs, and ignore all others.

    As in vLLM a name may be cut short, unless it could be several options.

    Args:
        arguments: of the command line; the file of ``--config`` is read as well.
        with_file: False = that file is not read.

    Returns:
        The options by their long names, and "uncompiled": whether compilation is switched off (on a CPU also by
        adapters and TORCH_COMPILE_DISABLE); "draft" and "draft_method": the draft and its method, "" without one;
        "draft_ranks": its tensor parallel size, None = the target's; "expert_ranks": the ranks that share whole
        experts, 0 = each has a part of every expert.
    """
    parser = _Parser(add_help=False, exit_on_error=False)
    for names in _TEXTS:
        parser.add_argument(*names.split())
    parser.add_argument("--hf-token", nargs="?", const=True)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--lora-modules", nargs="+", default=())
    switches = ("enforce-eager", "enable-lora", "trust-remote-code", "disable-hybrid-kv-cache-manager", "enable-eplb")
    for switch in switches:
        parser.add_argument(f"--{switch}", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--enable-expert-parallel", "-ep", action=argparse.BooleanOptionalAction, default=False)
    for name, short in (("tensor", "-tp"), ("pipeline", "-pp"), ("data", "-dp")):
        parser.add_argument(f"--{name}-parallel-size", short, type=int, default=1)
    # As in vLLM: what the file holds stands before the options, which replace it.
    words = [*(words_of_file(arguments) if with_file else ()), *dashed_words(arguments)]
    try:
        given = parser.parse_known_args(_fold_fields(words))[0]
    except argparse.ArgumentError:
        given = parser.parse_args([])  # vLLM says what is wrong with it
    given.uncompiled = _is_uncompiled(given)
    given.draft, given.draft_method = _speculation(given)
    ranks = max(1, given.tensor_parallel_size) * max(1, given.data_parallel_size)
    given.expert_ranks = ranks if given.enable_expert_parallel else 0
    given.draft_ranks = _fields(given.speculative_config).get("draft_tensor_parallel_size")
    return given


def _is_uncompiled(given: argparse.Namespace) -> bool:
    """Decide as vLLM on a CPU does: first by these three options, then by the mode, then by the level."""
    if given.enforce_eager or given.enable_lora or os.environ.get(NO_COMPILATION) == "1":
        return True
    mode = _fields(given.compilation_config).get("mode")
    return given.optimization_level == "0" if mode is None else str(mode).lower() in ("0", "none")


def _fold_fields(words: Sequence[str]) -> list[str]:
    """Collect fields such as -cc.mode=3 in one JSON object for each option, after all other words.

    As in vLLM, the object then replaces the JSON of the option itself.
    """
    others: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if not name.startswith("-") or "." not in name:
            others.append(word)
            continue
        option, field = name.split(".")[:2]
        objects.setdefault(option, {})[field] = _json_or_text(value if equals else next(left, ""))
    return others + [word for option, fields in objects.items() for word in (option, json.dumps(fields))]


def _json_or_text(value: str) -> Any:
    try:
        return parse_json(value)
    except ValueError:
        return value


def _fields(given: str | None) -> dict[str, Any]:
    """Parse the fields of an option that holds a JSON object; {} for anything else."""
    fields = _json_or_text(given or "")
    return fields if isinstance(fields, dict) else {}


def _speculation(given: argparse.Namespace) -> tuple[str, str]:
    """Return (draft, method), from separate options or from the JSON that holds both."""
    options = _fields(given.speculative_config)
    return str(given.spec_model or options.get("model") or ""), str(given.spec_method or options.get("method") or "")


def draft_config(given: argparse.Namespace) -> Mapping[str, Any]:
    """Read config.json of the draft in a local folder; {} without one, and for a damaged one, which vLLM reports."""
    path = Path(given.draft) / "config.json"
    try:
        config = read_json(path) if given.draft else {}
        if not isinstance(config, dict):
            return {}
        refuse_damaged(config, path)
    except (OSError, ValueError, CheckpointError):
        return {}
    return config


def parallel_ranks(extra_args: Sequence[str]) -> int:
    """Count the processes of a server that hold a part of the model, each with a cache."""
    given = given_options(extra_args)
    return prod(max(1, n) for n in (given.tensor_parallel_size, given.pipeline_parallel_size, given.data_parallel_size))


def hub_of(extra_args: Sequence[str]) -> Hub:
    """Return what these options of ``vllm serve`` download of a hub id."""
    given = given_options(extra_args)
    return Hub(given.revision, given.download_dir, given.hf_token, given.trust_remote_code)


def context_tokens(given: str | None, usual: int) -> int:
    """Return the tokens of the longest sequence; 0 where vLLM itself finds out what fits, or nothing is known.

    Args:
        given: vLLM's --max-model-len: a number, with k or m (thousands, millions) or K or M (powers of two), or auto.
        usual: the default without it.
    """
    if given is None:
        return usual
    number = _TOKENS.fullmatch(given.strip())
    if number is None:
        return 0
    tokens = float(number[1]) if "." in number[1] else int(number[1])
    return int(tokens * _SUFFIXES[number[2]])


def dashed_words(arguments: Sequence[str]) -> list[str]:
    """Return a command line of ``vllm serve`` with the names of options as its help writes them."""
    return [_dash(argument) for argument in arguments]


def words_of_file(arguments: Sequence[str]) -> list[str]:
    """Return the options in the file of ``--config``, which vLLM reads where the name is a separate word."""
    words = list(arguments)
    place = words.index("--config") + 1 if "--config" in words else 0
    return _read_file(words[place]) if 0 < place < len(words) else []


def _read_file(path: str) -> list[str]:
    """Read the options in a file of ``--config``; [] for a file that vLLM will refuse."""
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
            words.append(_dash(f"--{name}"))
        elif first is not False and first is not None and first != []:  # a date, for one, is a word to vLLM
            words += [_dash(f"--{name}"), str(first)]
    return words


def _dash(argument: str) -> str:
    """Return an option as the help writes it; vLLM reads underscores as well."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


class _Parser(argparse.ArgumentParser):
    """Parse some of vLLM's options; raise an exception for any error, an ambiguous short name included."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)
