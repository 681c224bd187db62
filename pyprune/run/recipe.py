"""From a preset, a recipe file and single settings to one validated PruneConfig.

Later sources win: preset, the recovery that a recipe names, the recipe itself, a recovery that the caller names,
options by name, and ``key.path=value`` settings. A recipe is YAML or JSON with the layout of
:class:`pyprune.config.run.PruneConfig`, plus optional ``preset`` and ``recovery`` keys.
Without a preset, the method's own preset is the start, wherever the method was named: a recipe with ``method: dress``
and ``--method dress`` give the same options. `pyprune recover` reads
:class:`pyprune.config.run.RecoverCheckpointConfig` in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from typing_extensions import override

from pyprune.config.run import PruneConfig, ReconstructCheckpointConfig, RecoverCheckpointConfig
from pyprune.errors import LONGEST_NAME, ConfigError, shown
from pyprune.methods.registry import (
    OTHER_NAMES,
    check_name,
    get_method,
    method_modules,
    method_preset,
    note_of_name,
    presets,
    read_config,
)
from pyprune.methods.registry import preset as find_preset
from pyprune.runtime.files import read_bounded
from pyprune.runtime.progress import warn

RECIPE_BYTES = 1_000_000
"""Our largest recipe has 2,000; a list of every channel of the largest models has 100,000."""
DEEPEST = 20
"""Levels of mappings and lists; options have four."""
LONGEST_NUMBER = 100
"""Characters."""
LONGEST_MARK = 200
"""Characters of YAML's own description of a mistake."""


class _Loader(yaml.SafeLoader):
    """Reads the YAML that options need: mappings with distinct names, lists, texts, numbers, true, false and null.

    Anchors and aliases are refused (a few lines of them make billions of values), and so are tags; a date is text.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - the parent's way
        first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith((":timestamp", ":merge", ":value"))]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0

    @override
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _mistake("anchors (&) and aliases (*) are not read; write the values out", event)
        if getattr(event, "tag", None) is not None:
            raise _mistake("tags (!) are not read; write the value without one", event)
        if self.depth == DEEPEST:
            raise _mistake(f"more than {DEEPEST} lists and mappings are inside each other", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float")):
            _check_number(node)
        return node

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if not key.tag.endswith(":str"):
                raise _mistake("this is no name of an option; put a word there", key)
            if key.value in names:
                raise _mistake(f"the name {shown(key.value)} occurs twice", key)
            names.add(key.value)
        return super().construct_mapping(node, deep)


def _check_number(node: yaml.ScalarNode) -> None:
    if len(node.value) > LONGEST_NUMBER:
        raise _mistake(f"a number has {len(node.value):,} characters", node)


def _mistake(problem: str, at: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=cast(yaml.Mark, at.start_mark))


def read_yaml(text: str, what: str) -> Any:
    """Read the YAML of a recipe or of a single value, in time linear in its length.

    Args:
        text: YAML or JSON, of bounded length.
        what: begins the error message.

    Raises:
        ConfigError: it is not YAML, or has what options never need: anchors, aliases, tags, names that are no texts or
            are there twice, numbers of hundreds of digits, or more than :data:`DEEPEST` levels.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe one
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not valid YAML: {_reason(error)}. Correct it.") from error
    except (ValueError, ArithmeticError, TypeError, LookupError) as error:
        # PyYAML converts numbers and escapes by int("0b_", 2) or chr(0x110000), whose errors pass through.
        raise ConfigError(f"{what} is not valid YAML: {_cut(str(error))}. Correct it.") from error


def _reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return place + _cut(getattr(error, "problem", None) or str(error))


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_MARK else f"{line[:LONGEST_MARK]} ..."


def _printable_path(path: str | Path) -> str:
    """Return the path for a message, shortened or escaped where no person would name a file so."""
    text = str(path)
    return text if len(text) <= LONGEST_NAME and text.isprintable() else shown(text)


def build_config(
    *,
    preset: str | None = None,
    recovery: str | None = None,
    recipe: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
) -> PruneConfig:
    """Compose the options of ``pyprune prune``.

    Args:
        preset: name of a preset to start from; it wins over the recipe's own ``preset`` key; the recipe's other keys
            win over it.
        recovery: name of a recovery to follow the cut; it wins over the recipe's keys about recovery.
        recipe: path of a YAML or JSON file.
        options: dotted name -> value, for example {"ratio": 0.25, "data.samples": 128}; None values are left out.
        settings: "dotted.name=value" texts; the value is read as YAML.

    Raises:
        ConfigError: an unreadable recipe, an unknown preset or option, values that are not allowed, a preset of another
            method than the recipe's, or two sets of options (``--method taylor-plain --preset taylor``).
    """
    from pyprune.config.recoveries import as_prune_options

    data = read_recipe(recipe) if recipe is not None else {}
    named, recovers = (_name_in(data, key, recipe) for key in ("preset", "recovery"))
    chosen = _chosen(options, settings)
    form, of_recipe = _take_form(chosen), _take_form(data)
    form = form if "method" in chosen else of_recipe
    if form and preset and OTHER_NAMES.get(form, form) != OTHER_NAMES.get(preset, preset):
        raise ConfigError(f"The method {form!r} and the preset {preset!r} are two sets of options. Name one of them.")
    preset = form if preset is None else preset
    if isinstance(method := data.get("method"), str) and method != "none":
        check_name(method)  # reports a mistake in the recipe even where --method wins over it
    wanted = str(named) if preset is None and named is not None else preset
    if wanted is not None:
        start = preset_options(wanted)
        _refuse_other_method(wanted, start["method"], chosen.get("method", data.get("method")))
    else:
        start = default_options(merge(data, chosen))
    if recovers is not None:
        start = merge(start, as_prune_options(recovers))
    if recovery is not None:
        data = merge(data, as_prune_options(recovery))
    say_changed_name(wanted or str(start.get("method")))
    given = merge(data, chosen)
    start = merge(start, _shared_overrides(start, given))
    if "axes" in (given.get("score") or {}) and start.get("score"):
        start = merge(start, {"score": {"further_axes": []}})  # axes that are named are all that are open
    config = read_config(_with_default_text(merge(merge(start, data), chosen)))
    _refuse_idle(chosen, config)
    return config


def _take_form(options: dict[str, Any]) -> str | None:
    """Replace a form (taylor-trained) that is given as the method by its method, and return it as a preset's name."""
    form = options.get("method")
    if not isinstance(form, str) or form in method_modules() or form not in {*presets(), *OTHER_NAMES}:
        return None
    options["method"] = preset_options(form)["method"]
    return form


@cache
def say_changed_name(name: str) -> None:
    """Print once what a name stands for, if that is not plain."""
    if note := note_of_name(name):
        warn(note)


_TEXT_OPTIONS = ("source", "split", "field", "sequence_length")
"""Options of ``data`` for which text is read, and in windows of which length."""


def _shared_overrides(start: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Apply overrides of `data` to `recovery_data` when the preset uses one text for both.

    Args:
        start: the preset's options.
        named: options that the user set; those of `recovery_data` win.
    """
    data, recovery, overrides = start.get("data"), start.get("recovery_data"), named.get("data")
    if not (isinstance(data, Mapping) and isinstance(recovery, Mapping) and isinstance(overrides, Mapping)):
        return {}
    if data.get("source") != recovery.get("source"):
        return {}
    alike = [name for name in _TEXT_OPTIONS if data.get(name) == recovery.get(name)]
    return {"recovery_data": {name: overrides[name] for name in alike if name in overrides}}


_SOURCE_OPTIONS = ("source", "split", "field", "mixture", "chat_template", "cross_documents", "bos")
"""Options of ``data`` that the run's other texts share unless they name a source."""


def _with_default_text(options: dict[str, Any]) -> dict[str, Any]:
    """Default the source and size of `cut.data` and `recovery_data` to those of `data`.

    The size is not taken from scoring methods, which read little text.
    """
    data, method = options.get("data"), options.get("method")
    if not isinstance(data, Mapping):
        return options
    scores = not isinstance(method, str) or method == "none" or get_method(method).scores
    size = {name: data[name] for name in ("samples", "sequence_length") if name in data and not scores}
    source = {name: data[name] for name in _SOURCE_OPTIONS if name in data}
    result, cut = dict(options), options.get("cut")
    if isinstance(cut, Mapping) and isinstance(cut.get("data"), Mapping):
        result["cut"] = {**cut, "data": _with_defaults(cut["data"], size, source)}
    if isinstance(options.get("recovery_data"), Mapping):
        result["recovery_data"] = _with_defaults(options["recovery_data"], size, source)
    return result


def _with_defaults(text: Mapping[str, Any], size: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a text with the defaults for those it does not set."""
    return {**size, **({} if {"source", "mixture"} & set(text) else source), **text}


def write_out_texts(config: PruneConfig) -> PruneConfig:
    """Return the options with `cut.data` and `recovery_data` written out where they default to `data`."""
    options, source = config.to_dict(), {"source": config.data.source}
    if config.cut.data is None and config.reads_text_at_the_cut:
        options["cut"]["data"] = dict(source)
    if config.recovery_data is None:
        options["recovery_data"] = dict(source)
    return read_config(_with_default_text(options))


def _refuse_idle(chosen: Mapping[str, Any], config: PruneConfig) -> None:
    """Refuse options that were given by name and that no stage of the run reads."""
    problems = []
    for stage, options in unread(config).items():
        given = [name for name in dotted_names(chosen) if is_among(name, options)]
        if given:
            problems.append(
                f"{' and '.join(given)} would do nothing: this run has no stage {stage!r} (stages.before is "
                f"{list(config.stages.before)}, stages.after {list(config.stages.after)}). "
                f"{_with_stage(stage, config.method)}"
            )
    problems += _idle_options(chosen, config)
    if problems:
        raise ConfigError(problems)


def switched_off(config: PruneConfig | RecoverCheckpointConfig) -> dict[str, str]:
    """Return the dotted names of options that other options switch off -> that option and its value."""
    places = {"recover": config.recover.idle}
    found: dict[str, str] = {}
    if isinstance(config, PruneConfig):
        places["cut"] = config.cut.idle
        if config.options is not None:
            places[config.method] = config.options.idle
        if config.method != "none":
            method = get_method(config.method)
            reasons = method.unread_options(config)
            found = {name: f"method {method.name!r}, which {why}" for name, why in reasons.items()}
            if method.scores:
                places["score"] = config.score_options.idle
        if config.plan is not None:
            decided = ("ratio_of", "hidden_multiple", "score", "seed")  # of ratio and the method's own, a note says it
            found |= dict.fromkeys(decided, f"plan {config.plan!r}, which decides what is removed")
    return found | {f"{place}.{name}": f"{place}.{why}" for place, idle in places.items() for name, why in idle.items()}


def _idle_options(chosen: Mapping[str, Any], config: PruneConfig | RecoverCheckpointConfig) -> list[str]:
    """Return a sentence for each option that was given by name and that other options switch off."""
    return [
        f"{name} would do nothing with {why}; leave it out, or change that."
        for option, why in switched_off(config).items()
        for name in dotted_names(chosen)
        if is_among(name, [option])
    ]


def unread(config: PruneConfig) -> dict[str, list[str]]:
    """Return the stages that the run lacks -> dotted names of the options that only they would read."""
    stages = (*config.stages.before, *config.stages.after)
    regularising = config.options.regularising_options if config.options is not None else ()
    readers = {
        "regularise": [f"{config.method}.{name}" for name in regularising],
        "recover": ["recover", *(["recovery_data"] if not config.stages.after else [])],
        "finetune": ["finetune"],
    }
    return {stage: options for stage, options in readers.items() if options and stage not in stages}


def is_among(name: str, options: Sequence[str]) -> bool:
    """Check whether a dotted name is one of these options or inside one."""
    return any(f"{name}.".startswith(f"{option}.") for option in options)


def _with_stage(stage: str, method: str) -> str:
    """Return the advice how to get a run with a stage."""
    if stage != "regularise":
        return f"Add it with --set stages.after=[{stage}]."
    stages_of = {name: build().stages for name, build in get_method(method).presets.items()}
    presets = [name for name, stages in stages_of.items() if stage in (*stages.before, *stages.after)]
    return f"Presets of {method} with it: {', '.join(presets)}. What trains after the cut is set by recover.train."


def _refuse_other_method(preset: str, method: str, asked: Any) -> None:
    """Refuse a preset next to another method, which would win over most of its options."""
    if isinstance(asked, str) and asked != method:  # anything else is refused with its value later
        raise ConfigError(
            f"The preset {preset!r} is of the method {method!r}, but method is {shown(asked)}; leave one of them out, "
            f"or name the method too (method={method})."
        )


def build_recovery(
    *,
    preset: str | None = None,
    recipe: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
) -> RecoverCheckpointConfig:
    """Compose the options of ``pyprune recover``; arguments as in :func:`build_config`, ``preset`` names a recovery.

    Raises:
        ConfigError: as :func:`build_config`.
    """
    data = read_recipe(recipe) if recipe is not None else {}
    named = _name_in(data, "preset", recipe) if preset is None else preset
    start: dict[str, Any] = {}
    if named is not None:
        from pyprune.config.recoveries import recovery

        start = recovery(named).to_dict()
    chosen = _chosen(options, settings)
    config = RecoverCheckpointConfig.from_dict(merge(merge(start, data), chosen))
    if problems := _idle_options(chosen, config):
        raise ConfigError(problems)
    return config


def build_reconstruction(
    *, recipe: str | Path | None = None, options: Mapping[str, Any] | None = None, settings: Sequence[str] = ()
) -> ReconstructCheckpointConfig:
    """Compose the options of ``pyprune reconstruct``; arguments as in :func:`build_config`.

    Raises:
        ConfigError: as :func:`build_config`.
    """
    data = read_recipe(recipe) if recipe is not None else {}
    usual = ReconstructCheckpointConfig().to_dict()
    return ReconstructCheckpointConfig.from_dict(merge(merge(usual, data), _chosen(options, settings)))


def _name_in(data: dict[str, Any], key: str, recipe: str | Path | None) -> str | None:
    """Take the name of a preset out of a recipe's data."""
    named = data.pop(key, None)
    if named is not None and not isinstance(named, str):
        raise ConfigError(f"{key} is {shown(named)} in {_printable_path(str(recipe))}; expected the name of a {key}.")
    return named


def _chosen(options: Mapping[str, Any] | None, settings: Sequence[str]) -> dict[str, Any]:
    """Return options by name, then settings, as nested plain data."""
    chosen: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if value is not None:
            chosen = merge(chosen, nest(name, value))
    for setting in settings:
        chosen = merge(chosen, parse_setting(setting))
    return chosen


def preset_options(name: str) -> dict[str, Any]:
    """Return a preset as plain data.

    Raises:
        ConfigError: there is no preset of this name.
    """
    return find_preset(name).to_dict()


def default_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a run starts from without a preset.

    A plan without a method is applied as it is, without training; a method starts from its own preset.

    Args:
        given: options of the recipe, by name and by settings.

    Raises:
        ConfigError: there is no method of the given name.
    """
    method = given.get("method", PruneConfig.method if given.get("plan") is None else "none")
    if not isinstance(method, str):
        return {}  # refused with its value when the options are read
    if method == "none":
        return {"method": "none", "stages": {"before": []}}
    return method_preset(method).to_dict()


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Read a YAML or JSON recipe as plain data.

    Raises:
        ConfigError: the file is missing or longer than :data:`RECIPE_BYTES`, cannot be read by :func:`read_yaml`, or
            does not hold a mapping.
    """
    name = f"The recipe {_printable_path(path)}"
    try:
        text = read_bounded(path, RECIPE_BYTES)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or _cut(str(error))
        raise ConfigError(f"{name} cannot be read: {reason}. Give the path of a YAML file.") from error
    data = read_yaml(text, name)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{name} holds {type(data).__name__}; expected a mapping of options.")
    return data


def parse_setting(text: str) -> dict[str, Any]:
    """Read "elder.gates.penalty_weight=0.05" as {"elder": {"gates": {"penalty_weight": 0.05}}}.

    Raises:
        ConfigError: there is no "=" or no name before it, it has more than :data:`DEEPEST` parts, or the value cannot
            be read by :func:`read_yaml`.
    """
    name, equals, value = text.partition("=")
    parts = name.split(".")
    if not equals or not all(part.strip() for part in parts) or len(parts) > DEEPEST:
        raise ConfigError(
            f"--set got {shown(text)}; expected key.path=value, for example elder.gates.penalty_weight=0.05."
        )
    return nest(name.strip(), read_yaml(value, f"--set {_printable_path(name)}: the value {shown(value)}"))


def nest(name: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for the dotted name "a.b"."""
    for part in reversed(name.split(".")):
        value = {part.strip(): value}
    return value  # type: ignore[no-any-return]


def dotted_names(data: Mapping[str, Any]) -> list[str]:
    """Return ["a.b", "c"] for {"a": {"b": 1}, "c": 2}: the names of all values."""
    names: list[str] = []
    for name, value in data.items():
        below = dotted_names(value) if isinstance(value, Mapping) else []
        names += [f"{name}.{inner}" for inner in below] or [name]
    return names


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``over`` laid on top; mappings are merged, everything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return result
