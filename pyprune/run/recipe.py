"""From a preset, a recipe file and single settings to one validated PruneConfig.

Later sources win: preset, then the recovery that a recipe names, then the recipe itself, then a recovery that is asked
for beside it, then options by name, then ``key.path=value`` settings. A recipe is YAML or JSON with the layout of
:class:`pyprune.config.run.PruneConfig`, plus optional ``preset`` and ``recovery`` keys.
Where no preset is named, the one of the method is the start, wherever that was named: a recipe with ``method: dress``
and ``--method dress`` give the same options. `pyprune recover` reads
:class:`pyprune.config.run.RecoverCheckpointConfig` in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from typing_extensions import override

from pyprune.config.run import PruneConfig, ReconstructCheckpointConfig, RecoverCheckpointConfig
from pyprune.errors import LONGEST_NAME, ConfigError, shown
from pyprune.methods.registry import check_name, get_method, method_preset, read_config
from pyprune.methods.registry import preset as find_preset
from pyprune.runtime.files import read_bounded

RECIPE_BYTES = 1_000_000
"""The largest of ours has 2,000; a list of every channel of the largest models has 100,000."""
DEEPEST = 20
"""Mappings and lists inside each other; options have four."""
LONGEST_NUMBER = 100
"""Characters."""
LONGEST_MARK = 200
"""Characters of what YAML itself says about a mistake."""


class _Loader(yaml.SafeLoader):
    """YAML as far as options need it: mappings with distinct names, lists, texts, numbers, true, false and null.

    No anchors and aliases (a few lines of them are billions of values), no tags; a date stays the text that it is.
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
                raise _mistake(f"the name {shown(key.value)} is there twice", key)
            names.add(key.value)
        return super().construct_mapping(node, deep)


def _check_number(node: yaml.ScalarNode) -> None:
    if len(node.value) > LONGEST_NUMBER:
        raise _mistake(f"a number has {len(node.value):,} characters", node)


def _mistake(problem: str, at: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=cast(yaml.Mark, at.start_mark))


def read_yaml(text: str, what: str) -> Any:
    """Read the YAML of a recipe or a single value: what somebody wrote, so nothing in it can cost more than reading it.

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
        raise ConfigError(f"{what} is not valid YAML: {_reason(error)}.") from error
    except (ValueError, ArithmeticError, TypeError, LookupError) as error:
        # What PyYAML calls for numbers and escapes, such as int("0b_", 2) and chr(0x110000), may raise through it.
        raise ConfigError(f"{what} is not valid YAML: {_cut(str(error))}.") from error


def _reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return place + _cut(getattr(error, "problem", None) or str(error))


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_MARK else f"{line[:LONGEST_MARK]} ..."


def _named(path: str | Path) -> str:
    """The path as it is, unless it is no name that a person gave a file."""
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
        preset: name of a preset to start from; it wins over the recipe's own ``preset`` key, and what else the recipe
            says wins over it.
        recovery: name of a recovery to follow the cut; it wins over everything that the recipe says of recovery.
        recipe: path of a YAML or JSON file.
        options: dotted name -> value, for example {"ratio": 0.25, "data.samples": 128}; None values are left out.
        settings: "dotted.name=value" texts; the value is read as YAML.

    Raises:
        ConfigError: an unreadable recipe, an unknown preset or option, values that are not allowed, or a preset of
            another method than the recipe's.
    """
    from pyprune.config.recoveries import as_prune_options

    data = read_recipe(recipe) if recipe is not None else {}
    named, recovers = (_name_in(data, key, recipe) for key in ("preset", "recovery"))
    chosen = _chosen(options, settings)
    if isinstance(method := data.get("method"), str) and method != "none":
        check_name(method)  # a mistake in the recipe, also where --method wins over it
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
    start = merge(start, _one_text(start, merge(data, chosen)))
    config = read_config(_with_amounts(merge(merge(start, data), chosen)))
    _refuse_idle(chosen, config)
    return config


_OF_A_TEXT = ("source", "split", "field", "sequence_length")
"""Options of ``data`` that say which text is read, and in windows of what length."""


def _one_text(start: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """What is named of ``data`` for recovery too, where a preset has both read one text.

    Args:
        start: the preset's options.
        named: by the user, of recovery's own text among them, which win.
    """
    usual, recovery, given = start.get("data"), start.get("recovery_data"), named.get("data")
    if not (isinstance(usual, Mapping) and isinstance(recovery, Mapping) and isinstance(given, Mapping)):
        return {}
    if usual.get("source") != recovery.get("source"):
        return {}
    alike = [name for name in _OF_A_TEXT if usual.get(name) == recovery.get(name)]
    return {"recovery_data": {name: given[name] for name in alike if name in given}}


_OF_A_SOURCE = ("source", "split", "field", "mixture", "chat_template", "cross_documents", "bos")
"""Options of ``data`` that other text of the run shares where it names no source of its own."""


def _with_amounts(options: dict[str, Any]) -> dict[str, Any]:
    """Other text of the cut or of recovery is the method's, as much, and in windows as long, unless it says.

    Not as much as what scores read, which is little.
    """
    usual, method = options.get("data"), options.get("method")
    if not isinstance(usual, Mapping):
        return options
    scores = not isinstance(method, str) or method == "none" or get_method(method).scores
    amounts = {name: usual[name] for name in ("samples", "sequence_length") if name in usual and not scores}
    source = {name: usual[name] for name in _OF_A_SOURCE if name in usual}
    result, cut = dict(options), options.get("cut")
    if isinstance(cut, Mapping) and isinstance(cut.get("data"), Mapping):
        result["cut"] = {**cut, "data": _completed(cut["data"], amounts, source)}
    if isinstance(options.get("recovery_data"), Mapping):
        result["recovery_data"] = _completed(options["recovery_data"], amounts, source)
    return result


def _completed(text: Mapping[str, Any], amounts: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Other text of a run, with what it does not name of its own."""
    return {**amounts, **({} if {"source", "mixture"} & set(text) else source), **text}


def with_texts_named(config: PruneConfig) -> PruneConfig:
    """The options as they are where the cut and recovery have text of their own: the method's, where none is named."""
    options, source = config.to_dict(), {"source": config.data.source}
    if config.cut.data is None and config.reads_text_at_the_cut:
        options["cut"]["data"] = dict(source)
    if config.recovery_data is None:
        options["recovery_data"] = dict(source)
    return read_config(_with_amounts(options))


def _refuse_idle(chosen: Mapping[str, Any], config: PruneConfig) -> None:
    """Refuse options that were given by name, and that no stage of the run reads: they would do nothing."""
    found = []
    for stage, options in unread(config).items():
        given = [name for name in dotted_names(chosen) if is_among(name, options)]
        if given:
            found.append(
                f"{' and '.join(given)} would do nothing: this run has no stage {stage!r} (stages.before is "
                f"{list(config.stages.before)}, stages.after {list(config.stages.after)}). "
                f"{_with_stage(stage, config.method)}"
            )
    found += _without_effect(chosen, config)
    if found:
        raise ConfigError(found)


def switched_off(config: PruneConfig | RecoverCheckpointConfig) -> dict[str, str]:
    """Dotted names of options that do nothing beside the values of others -> the option and the value that are why."""
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
            found |= dict.fromkeys(decided, f"plan {config.plan!r}, which says what goes")
    return found | {f"{place}.{name}": f"{place}.{why}" for place, idle in places.items() for name, why in idle.items()}


def _without_effect(chosen: Mapping[str, Any], config: PruneConfig | RecoverCheckpointConfig) -> list[str]:
    """One sentence for each option that was given by name, and that the values of others switch off."""
    return [
        f"{name} would do nothing beside {why}; leave it out, or change that."
        for option, why in switched_off(config).items()
        for name in dotted_names(chosen)
        if is_among(name, [option])
    ]


def unread(config: PruneConfig) -> dict[str, list[str]]:
    """Stage that the run lacks -> dotted names of the options (with all inside them) that it alone would read."""
    stages = (*config.stages.before, *config.stages.after)
    own = config.options.regularising_options if config.options is not None else ()
    readers = {
        "regularise": [f"{config.method}.{name}" for name in own],
        "recover": ["recover", *(["recovery_data"] if not config.stages.after else [])],
        "finetune": ["finetune"],
    }
    return {stage: options for stage, options in readers.items() if options and stage not in stages}


def is_among(name: str, options: Sequence[str]) -> bool:
    """Whether a dotted name is one of these options or inside one."""
    return any(f"{name}.".startswith(f"{option}.") for option in options)


def _with_stage(stage: str, method: str) -> str:
    """What to do for a run that has a stage."""
    if stage != "regularise":
        return f"Add it with --set stages.after=[{stage}]."
    every = {name: build().stages for name, build in get_method(method).presets.items()}
    presets = [name for name, stages in every.items() if stage in (*stages.before, *stages.after)]
    return f"Presets of {method} with it: {', '.join(presets)}. What trains after the cut is set by recover.train."


def _refuse_other_method(preset: str, method: str, asked: Any) -> None:
    """The method would win over the preset, which then did little of what its name says."""
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
    if found := _without_effect(chosen, config):
        raise ConfigError(found)
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
        raise ConfigError(f"{key} is {shown(named)} in {_named(str(recipe))}; expected the name of a {key}.")
    return named


def _chosen(options: Mapping[str, Any] | None, settings: Sequence[str]) -> dict[str, Any]:
    """Options by name, then settings, as nested plain data."""
    chosen: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if value is not None:
            chosen = merge(chosen, nested(name, value))
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
    """Return what a run starts from when no preset was named.

    A plan without a method is applied as it is, without training; a method starts from its own preset.

    Args:
        given: what the recipe, the options and the settings say.

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
    name = f"The recipe {_named(path)}"
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
    return nested(name.strip(), read_yaml(value, f"--set {_named(name)}: the value {shown(value)}"))


def nested(name: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for the dotted name "a.b"."""
    for part in reversed(name.split(".")):
        value = {part.strip(): value}
    return value  # type: ignore[no-any-return]


def dotted_names(data: Mapping[str, Any]) -> list[str]:
    """Return ["a.b", "c"] for {"a": {"b": 1}, "c": 2}: the names of all values."""
    found: list[str] = []
    for name, value in data.items():
        below = dotted_names(value) if isinstance(value, Mapping) else []
        found += [f"{name}.{inner}" for inner in below] or [name]
    return found


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``over`` laid on top; mappings are merged, everything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return result
