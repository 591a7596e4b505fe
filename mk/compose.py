"""From command-line overrides to a checked `Config`: composition by Hydra, typed settings, one-line errors.

An experiment brings its own typed fields: a dataclass of experiments/settings, whose values stand in
configs/experiment/<name>.yaml. A new experiment touches nothing in here.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import itertools
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mk.config import CONFIG_DIR, GROUPS, Config, config_hash, group_options, resolved
from mk.errors import MkError
from mk.schedule.stored import StoredSchedule
from mk.validation import closest

TOP_KEYS = tuple(field.name for field in dataclasses.fields(Config))
COLUMN = 20  # of the help text: the longest name, and room
HELP_HINT = "python run.py --help lists experiments, groups and options"

ConfigStore.instance().store(name="schema", node=Config)


def load_config(overrides: Sequence[str] = ()) -> Config:
    """Compose `configs/` with Hydra overrides (`group=option`, `group.key=value`).

    Raises MkError naming the override at fault: an unknown group, option or key, a wrong type, a value that is missing.
    """
    overrides = [in_full(override) for override in overrides]
    _check_choices(overrides)
    try:
        tree = _compose(overrides)
        _type_experiment(tree)
        missing = sorted(OmegaConf.missing_keys(tree))
        if missing:
            raise MkError(f"{missing[0]} has no value", hint=f"add {missing[0]}=...")
        config = OmegaConf.to_object(tree)
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, overrides) from error
    assert isinstance(config, Config)
    return _with_schedule(config)


def _with_schedule(config: Config) -> Config:
    """With the axes of the schedule that `schedule.path` names, if any."""
    if config.schedule.path is None:
        return config
    return StoredSchedule.load(Path(config.schedule.path)).apply(config)


def stored_config(values: Mapping[str, Any]) -> Config:
    """A configuration from its resolved values, as a run folder keeps them. Raises MkError for one of other schemas."""
    try:
        tree = OmegaConf.merge(OmegaConf.structured(Config), values)
        assert isinstance(tree, DictConfig)
        _type_experiment(tree)
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise _explain(error, []) from error
    assert isinstance(config, Config)
    return config


def _type_experiment(tree: DictConfig) -> None:
    """Give the experiment's part of a configuration its schema."""
    name = OmegaConf.select(tree, "experiment.name", throw_on_missing=True)
    tree.experiment = OmegaConf.merge(
        {"experiment": OmegaConf.structured(_settings(name))}, {"experiment": tree.experiment}
    ).experiment


def in_full(override: str) -> str:
    """`run=ID` is short for `experiment.run=ID`."""
    return f"experiment.{override}" if override.startswith("run=") else override


def vary(config: Config, overrides: Sequence[str]) -> Config:
    """A configuration with further overrides (`group=option`, `group.key=value`), as if given with the first ones.

    Raises MkError naming the override at fault.
    """
    _check_choices(overrides)
    tree = OmegaConf.structured(config)
    try:
        for override in _parse(overrides):
            key, value = override.get_key_element(), override.value()
            if key in GROUPS:
                value = _compose([f"{key}={value}"])[key]  # unresolved: it may take values from other groups
            elif not _has(tree, key):
                raise MkError(f"{key} is no key of the configuration", hint="python run.py --cfg job lists them")
            OmegaConf.update(tree, key, value, merge=False)
        varied = OmegaConf.to_object(tree)
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, overrides) from error
    assert isinstance(varied, Config)
    return _with_schedule(varied)


def _has(tree: DictConfig, key: str) -> bool:
    """Whether the configuration has this dotted key, with or without a value."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(tree, parent) if parent else tree
    # `in node` would pass over those without a value
    return isinstance(node, DictConfig) and name in node.keys()  # noqa: SIM118


def _compose(overrides: Sequence[str]) -> DictConfig:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def _settings(experiment: str) -> type:
    """`train_nano` -> experiments.settings.TrainNano."""
    settings = importlib.import_module("experiments.settings")
    schema: type | None = getattr(settings, experiment.title().replace("_", ""), None)
    if schema is None:
        raise MkError(f"experiment {experiment} has no dataclass in experiments/settings")
    return schema


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of the values that `a,b`, `range(...)` and the like give a key; the last key varies fastest."""
    axes = []
    for text, override in zip(overrides, _parse(overrides), strict=True):
        if override.is_sweep_override():
            try:
                values = list(override.sweep_string_iterator())
            except HydraException as error:  # a glob, an interval
                raise MkError(f"{text}: cannot be expanded here", hint="a,b or range(a,b)") from error
            axes.append([f"{override.get_key_element()}={value}" for value in values])
        else:
            axes.append([text])
    return [list(job) for job in itertools.product(*axes)]


def is_shuffled(override: str) -> bool:
    """Whether it gives a key several values in an order that is drawn at every look."""
    (parsed,) = _parse([override])
    return parsed.is_sweep_override() and bool(getattr(parsed.value(), "shuffle", False))


def experiment_main(name: str) -> Callable[[Config], int | None]:
    """`main` of experiments/<name>.py; what it returns is the exit status, None meaning 0."""
    if importlib.util.find_spec(f"experiments.{name}") is None:
        raise MkError(f"experiment {name} has no experiments/{name}.py")
    main: Callable[[Config], int | None] = importlib.import_module(f"experiments.{name}").main
    return main


def to_yaml(config: Config) -> str:
    """What `--cfg job` prints and a run folder keeps: the resolved configuration, its hash in a comment above."""
    return f"# config_hash: {config_hash(config)}\n{OmegaConf.to_yaml(OmegaConf.create(resolved(config)))}"


def help_text() -> str:
    """Usage, experiments with a line each, groups with their options; reads files only, imports no experiment."""
    chosen = _default_options()
    lines = [
        "usage: python run.py [experiment=NAME] [GROUP=OPTION ...] [GROUP.KEY=VALUE ...]",
        "       python run.py -m GROUP=A,B ...    run every combination, one after the other",
        "       python run.py -m GROUP=A,B ... hydra/launcher=joblib    several at once (joblib, submitit or ray)",
        "       python run.py --cfg job ...       print the resolved configuration and exit",
        "",
        "experiments (* = default)",
    ]
    for name in group_options("experiment"):
        lines.append(f"  {_starred('experiment', name, chosen):{COLUMN}}{_experiment_line(name)}")
    lines += ["", "groups (* = default)"]
    for group in GROUPS:
        if group != "experiment":
            options = " ".join(_starred(group, option, chosen) for option in group_options(group))
            lines += [f"  {group:{COLUMN}}{options}", f"  {'':{COLUMN}}{_group_line(group)}"]
    others = ", ".join(key for key in TOP_KEYS if key not in GROUPS)
    lines += ["", f"other keys: {others}. MK_TRACEBACK=1 prints tracebacks."]
    return "\n".join(lines)


def _starred(group: str, option: str, chosen: dict[str, str]) -> str:
    return option + "*" * (chosen[group] == option)


def _default_options() -> dict[str, str]:
    entries = OmegaConf.load(CONFIG_DIR / "config.yaml").defaults
    return {str(group): entry[group] for entry in entries if isinstance(entry, DictConfig) for group in entry}


def _experiment_line(name: str) -> str:
    path = CONFIG_DIR.parent / "experiments" / f"{name}.py"
    doc = ast.get_docstring(ast.parse(path.read_text())) if path.exists() else None
    return doc.splitlines()[0] if doc else "(no description)"


def _group_line(group: str) -> str:
    return str(typing.get_type_hints(Config)[group].__doc__).splitlines()[0]


def _parse(overrides: Sequence[str]) -> list[Override]:
    try:
        parsed: list[Override] = OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise MkError(
            f"cannot read {error.override!r}",
            hint="write key=value, and quote lists and text: 'batch.contexts=[10,20]' 'experiment.prompt=\"f(x):\"'",
        ) from error
    return parsed


def _check_choices(overrides: Sequence[str]) -> None:
    """Refuse what needs no composing to be seen wrong: several values, added or deleted keys, unknown options."""
    for text, override in zip(overrides, _parse(overrides), strict=True):
        key = override.key_or_group
        if override.is_sweep_override():
            raise MkError(f"{text} names several values", hint="add -m to run each of them")
        if override.is_add() or override.is_force_add() or override.is_delete():
            raise MkError(f"{text}: keys can neither be added nor deleted", hint=f"set one with {key}=...")
        if key in GROUPS:
            options, value = group_options(key), str(override.value())
            if value not in options:
                near = closest(value, options)
                guess = f"did you mean {key}={near}? " if near else ""
                raise MkError(f"unknown option {key}={value}", hint=f"{guess}{key} has {', '.join(options)}")
        elif key.split(".")[0] not in TOP_KEYS:
            near = closest(key, TOP_KEYS)
            raise MkError(f"unknown key {key}", hint=f"did you mean {near}?" if near else HELP_HINT)


def _explain(error: BaseException, overrides: Sequence[str]) -> MkError:
    """Hydra's exception as one line about the key at fault, with the nearest right spelling."""
    parsed = _parse(overrides)
    choices = [text for text, override in zip(overrides, parsed, strict=True) if override.key_or_group in GROUPS]
    if len(choices) < len(overrides):
        try:
            known = _dotted(_compose(choices))
        except (HydraException, OmegaConfBaseException):
            known = []  # a file is at fault, not the command line
        for override in parsed if known else []:
            key = override.key_or_group
            if key not in known:
                near = closest(key, known)
                return MkError(f"unknown key {key}", hint=f"did you mean {near}?" if near else HELP_HINT)
    while error.__cause__ is not None:  # Hydra wraps what OmegaConf says
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines()]
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    return MkError(f"{key}: {lines[0]}" if key else lines[0], hint=HELP_HINT)


def _dotted(node: DictConfig, prefix: str = "") -> list[str]:
    """Every key below `node`, dotted: model, model.name, ..."""
    keys = []
    for key in map(str, node):
        keys.append(prefix + key)
        child = None if OmegaConf.is_missing(node, key) else node[key]
        if isinstance(child, DictConfig):
            keys += _dotted(child, f"{prefix}{key}.")
    return keys
