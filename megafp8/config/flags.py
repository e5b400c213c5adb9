"""Command line of a run: values from all sources, and all problems.

argparse stops at its first error. To report all problems at once, the command line is split into options (a flag and
its values), and each is given to argparse separately. The values then override those of other sources.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Optional

from megafp8.config import fp8_lm, megatron_flags, recipe_values
from megafp8.config import help as flag_help
from megafp8.config.flag_parser import ACCUMULATED, FlagParser, cached_parser
from megafp8.config.schema import RunConfig
from megafp8.config.settings import (
    all_settings,
    settings_by_flag,
    value_of,
    with_values,
)
from megafp8.errors import ConfigError
from megafp8.utils.suggestions import did_you_mean, same_name

# ---- Values of settings from all sources, in the order in which they override each other ----------------------------
#     default  <  checkpoint (--use-checkpoint-args)  <  preset  <  --fp8-lm-level  <  --recipe of the file  <  file
#              <  --recipe flag  <  --precision-map file  <  flag
#
# A --model-preset on the command line replaces the model section of the --config file completely, because a mixture of
# two model shapes is never intended.


def merge(
    base: RunConfig,
    values: dict[str, Any],
    from_file: dict[str, Any],
    warnings: list[str],
    problems: list[str],
) -> tuple[RunConfig, frozenset[str]]:
    """Combine defaults or a checkpoint's settings, preset, files and flags.

    Args:
        base: the defaults, or the settings of a checkpoint.
        values: of flags, by setting; entries of the --precision-map file and of lists are added to them. `RECIPE`,
            `MAP_FILE` and `MIN_LR_RATIO` are taken out.
        from_file: of the configuration file, likewise.
        warnings: to which what overrides what is added.
        problems: to which an unknown preset and unreadable files are added.

    Returns:
        The settings, and the names of those that the configuration file gives.
    """
    from megafp8.config.model_shapes import PRESETS  # here, so that --help does not import it

    recipe_of_file, recipe = from_file.pop(RECIPE, None), values.pop(RECIPE, None)
    map_of_file, map_path = from_file.pop(MAP_FILE, None), values.pop(MAP_FILE, None)
    ratio_of_file, ratio = from_file.pop(MIN_LR_RATIO, None), values.pop(MIN_LR_RATIO, None)
    for source in (from_file, values):
        if DATA_PHASES in source:
            source[DATA_PHASES] = _read_data_phases(source[DATA_PHASES], problems)
    named = values.get("model.model_preset")
    if named is not None and any(name.startswith("model.") for name in from_file):
        from_file = {name: value for name, value in from_file.items() if not name.startswith("model.")}
        warnings.append(f"--model-preset {named} replaces the model section of the configuration file")
    preset = named if named is not None else from_file.get("model.model_preset")
    if preset is not None and preset not in PRESETS:
        # A name in another case is that preset.
        written, preset = preset, same_name(preset, PRESETS)
        source = values if named is not None else from_file
        source["model.model_preset"] = preset
        if preset is None:
            near = did_you_mean(written, PRESETS) or f"; presets: {', '.join(PRESETS)}"
            problems.append(f"--model-preset {written}: unknown preset{near}")
    config = with_values(base, PRESETS[preset]) if preset is not None else base
    from_file = fp8_lm.remaining_values(from_file, values)
    # The level of a checkpoint is already in its other settings.
    level = values.get(fp8_lm.LEVEL, from_file.get(fp8_lm.LEVEL))
    config = with_values(config, fp8_lm.level_values(level, from_file | values) | from_file)
    if map_path or map_of_file:
        from_map = _read_precision_map(map_path or map_of_file, problems)
        values["precision.precision_map"] = (*from_map, *values.get("precision.precision_map", ()))
    for name in set(ACCUMULATED) & set(values):
        values[name] = (*value_of(config, name), *values[name])
    config = with_values(config, values)
    if ratio is not None and MIN_LR in values:
        problems.append("--min-lr and --min-lr-ratio are both given: keep one")
    elif (share := ratio_of_file if ratio is None and MIN_LR not in values else ratio) is not None:
        config = with_values(config, {MIN_LR: share * (config.optimizer.lr or 0)})  # a missing --lr is reported
    if chosen := recipe or recipe_of_file:
        own = values if recipe else from_file | values
        config = recipe_values.apply_recipe(config, chosen, own, warnings, problems)
    if warning := fp8_lm.level_warning(config):
        warnings.append(warning)
    return config, frozenset(from_file)


def flags_set(config: RunConfig) -> set[str]:
    """The flags of all settings that are not the default, wherever their values come from."""
    changed = (each for each in all_settings() if value_of(config, each.name) != each.default)
    return {flag for each in changed for flag in (each.flags if value_of(config, each.name) else each.off)}


def _read_precision_map(path: str, problems: list[str]) -> tuple[str, ...]:
    from megafp8.config.precision_map_file import read_map  # here, so that --help does not import it

    try:
        return read_map(path)
    except ConfigError as error:
        problems.extend(error.problems)
        return ()


def _read_data_phases(words: tuple[str, ...], problems: list[str]) -> tuple[str, ...]:
    """The contents of a file of phases; other words, such as those of a run's config.json, are contents already."""
    from megafp8.config.data_phases import is_file, read_phases  # here, so that --help does not import it

    try:
        return read_phases(words[0]) if is_file(words) else tuple(words)
    except ConfigError as error:
        problems.extend(error.problems)
        return tuple(words)


# ----------------------------------------------------------------------------------------------------------------------

DATA_PHASES = "data.data_phases"
RECIPE, MAP_FILE, MIN_LR_RATIO, MIN_LR = "recipe", "precision_map_file", "min_lr_ratio", "optimizer.min_lr"
"""Options whose values are those of other settings."""
MODEL_PRESET = "--model-preset"
_UNKNOWN = re.compile(r"(?:\S+:\d+: )?unknown (?:flag|key) \S+ *(.*)")
"""With the suggestion, from the problem of a flag or of a key of a configuration file."""
_MISSING = re.compile(r"\bmissing\b|^no training data|^learned position embeddings need")
"""In problems of a value that is not given."""
_NEGATIVE_NUMBER = re.compile(r"-\.?\d")


@dataclass(frozen=True)
class ParsedArgs:
    """A parsed command line.

    Attributes:
        config: the settings of the run.
        given: names of the settings given by flags, for example `model.num_layers`.
        from_file: names of the settings given by the --config file.
        dry_run: whether to print the plan of the run and stop.
        world_size: ranks of the dry run; None is the actual number.
        target: machine of the dry run; None is this one.
        gpu_memory_gib, gpu_peak_tflops: memory and dense BF16 peak of a target that is only like the named one.
        num_epochs: length of the run in epochs; `data.epochs` makes steps of it.
        strict: a dry run that does not fit ends with status 1.
        warnings: messages about flags without effect.
        is_unread: whether nothing of the --config file, or less than half of what was given, could be read.
    """

    config: RunConfig
    given: frozenset[str]
    from_file: frozenset[str] = frozenset()
    dry_run: bool = False
    world_size: Optional[int] = None
    target: Optional[str] = None
    gpu_memory_gib: Optional[float] = None
    gpu_peak_tflops: Optional[float] = None
    num_epochs: Optional[float] = None
    strict: bool = False
    warnings: tuple[str, ...] = ()
    is_unread: bool = False


def parse(argv: Sequence[str]) -> ParsedArgs:
    """Parse a command line, without the name of the program.

    `--help` with or without a topic, `--help-all`, `--version` and `--list-presets` print and exit with status 0.

    Raises:
        ConfigError: with all problems that `parse_with_problems` finds.
    """
    parsed, problems = parse_with_problems(argv)
    if parsed.num_epochs is not None:
        problems.append("--num-epochs: only `megafp8 pretrain`, also with --dry-run, reads data; give --train-iters")
    if problems:
        raise ConfigError(problems)
    return parsed


def parse_with_problems(
    argv: Sequence[str], from_checkpoint: Mapping[str, Any] = MappingProxyType({})
) -> tuple[ParsedArgs, list[str]]:
    """Parse a command line as far as possible, so that the caller can report these and other problems at once.

    Args:
        from_checkpoint: values of a checkpoint by setting, which all others override.

    Returns:
        The result and the problems: unknown, refused or incomplete flags, invalid values, an unreadable --config.
    """
    parser = cached_parser()
    if (topic := flag_help.requested_topic(argv)) is not None:
        sys.stdout.write(flag_help.help_text(topic, parser))
        raise SystemExit(0)
    of_sources: list[str] = []
    options_given = [[_with_dashes(parser, flag), *words] for flag, *words in _options_of(argv)]
    expanded, warnings = megatron_flags.replace(_with_config_flag(options_given, of_sources))
    values: dict[str, Any] = {}
    found: list[list[str]] = [[] for _ in expanded]  # problems of each option
    for option, problems in zip(expanded, found, strict=True):
        if option[0] in parser._option_string_actions:
            _read_option(parser, option, values, problems)
    config_path = values.pop("config", None)
    names = ("dry_run", "world_size", "target", "gpu_memory_gib", "gpu_peak_tflops", "strict", "num_epochs")
    options: dict[str, Any] = {name: values.pop(name) for name in names if name in values}
    given = frozenset(MIN_LR if name == MIN_LR_RATIO else name for name in values) - {RECIPE, MAP_FILE}
    base = with_values(RunConfig(), from_checkpoint)
    of_file: dict[str, Any] = {}
    if config_path is not None:
        from megafp8.config.config_file import read_config  # here, so that --help does not import it

        of_file = read_config(config_path, functools.partial(_read_option, parser), of_sources)
    num_read = len(given | of_file.keys())
    # A first word that is no flag may have been meant as a file.
    is_file_unread = not of_file if config_path is not None else any(not option[0] for option in expanded)
    epochs_of_file = of_file.pop("num_epochs", None)
    options.setdefault("num_epochs", epochs_of_file)
    config, from_file = merge(base, values, of_file, warnings, of_sources)
    given_flags = {option[0] for option in expanded} | flags_set(config)
    unknown = [
        (option, problems) for option, problems in zip(expanded, found, strict=True)
        if option[0] not in parser._option_string_actions
    ]  # fmt: skip
    _classify(parser, unknown, given_flags, warnings)
    if options.get("world_size", 1) < 1:
        of_sources.append(f"--world-size {options['world_size']}: must be at least 1")
    if options.get("strict") and not options.get("dry_run"):
        of_sources.append("--strict has no effect without --dry-run: give --dry-run, or remove it")
    problems = [*itertools.chain(*found), *of_sources]
    is_unread = is_file_unread or len(problems) > num_read
    parsed = ParsedArgs(config, given, from_file, warnings=tuple(warnings), is_unread=is_unread, **options)
    return parsed, problems


# ---- one option at a time -----------------------------------------------------------------------------------------


def _with_config_flag(options: list[list[str]], problems: list[str]) -> list[list[str]]:
    """The options, with --config before a configuration file that is the first word."""
    if not options or options[0][0] or not options[0][1].endswith((".yaml", ".yml", ".json")):
        return options
    if any(flag == "--config" for flag, *_ in options):
        problems.append(f"{options[0][1]} and --config are both given: keep one configuration file")
        return options[1:]
    return [["--config", options[0][1]], *options[1:]]


def _options_of(argv: Sequence[str]) -> list[list[str]]:
    """Split a command line before every flag; `--flag=value` becomes two words."""
    options: list[list[str]] = []
    for word in argv:
        if word.startswith("-") and len(word) > 1 and not _NEGATIVE_NUMBER.match(word):
            flag, equals, value = word.partition("=")
            options.append([flag, value] if equals else [flag])
        elif options:
            options[-1].append(word)
        else:
            options.append(["", word])
    return options


def _with_dashes(parser: argparse.ArgumentParser, flag: str) -> str:
    """The flag with - for _, as `--model_preset`, if that is a flag of megafp8 or Megatron-LM."""
    dashed = flag.replace("_", "-")
    if dashed == flag or flag in parser._option_string_actions:
        return flag
    is_known = dashed in parser._option_string_actions or dashed in megatron_flags.replaced.REPLACED
    return dashed if is_known or megatron_flags.classify(dashed, ()) else flag


def _read_option(
    parser: argparse.ArgumentParser, option: list[str], values: dict[str, Any], problems: list[str]
) -> None:
    flag, words = option[0], option[1:]
    action = parser._option_string_actions[flag]
    if action.nargs == "+":
        words = _without_brackets(words)
        option = [flag, *words]
    # argparse would take a value such as -1e-3 for an option, so it is joined to its flag.
    joined = [f"{flag}={words[0]}"] if len(words) == 1 and words[0].startswith("-") else option
    is_setting = "." in action.dest  # others may print the help of the parser
    try:
        namespace, left_over = (_parser_of(action) if is_setting else parser).parse_known_args(joined)
    except ConfigError as error:
        problems.append(_reword(flag, error.problems[0]))
        return
    if left_over:
        problems.append(f"{flag}: does not take {' '.join(map(repr, left_over))}")
    for name, value in vars(namespace).items():
        if isinstance(value, list):
            earlier = values.get(name, ()) if name in ACCUMULATED else ()
            value = (*earlier, *value)
        values[name] = value


@functools.cache
def _parser_of(action: argparse.Action) -> argparse.ArgumentParser:
    """A parser of one flag. argparse goes through all flags of a parser whenever it parses one."""
    parser = FlagParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser._add_action(copy.copy(action))
    return parser


def _classify(
    parser: argparse.ArgumentParser, unknown: list[tuple[list[str], list[str]]], given: set[str], warnings: list[str]
) -> None:
    """Report options that are no settings. Flags that are refused for the same reason are one problem, of the first.

    Args:
        unknown: the options, each with its problems, to which this appends.
    """
    refused: dict[str, tuple[list[str], list[str]]] = {}  # reason to the problems of the first flag, and all flags
    for (flag, *words), problems in unknown:
        if not flag:
            hint = "; configuration files end in .yaml, .yml or .json"
            problems.append(f"{words[0]!r} does not belong to any flag{hint}")
            continue
        if flag in settings_by_flag():
            refused.setdefault(settings_by_flag()[flag].former, (problems, []))[1].append(flag)
            continue
        verdict = megatron_flags.classify(flag, words, given)
        if verdict is None:
            problems.append(f"unknown flag {flag}{_suggestion(parser, flag)}")
        elif verdict.accepted:
            warnings.append(verdict.text)
        else:
            refused.setdefault(verdict.reason, (problems, []))[1].append(flag)
    for reason, (problems, flags) in refused.items():
        problems.append(megatron_flags.refusal_text(flags, reason))


def _without_brackets(words: list[str]) -> list[str]:
    """The values of a list that is written in brackets, as Megatron-LM's test configurations write lists.

    Between them may be commas, and quotes around each.
    """
    if words and words[0].startswith("[") and words[-1].endswith("]"):
        values = " ".join(words)[1:-1].replace(",", " ").split()
        return [value.strip("'\"") for value in values]
    return words


def _reword(flag: str, text: str) -> str:
    """Reword a message of argparse: the flag as given, then the problem."""
    _, _, problem = text.removeprefix("argument ").partition(": ")
    if problem.startswith(("expected one argument", "expected at least one argument")):
        problem = "a value is missing after it"
    if problem.startswith("ignored explicit argument"):
        problem = f"does not take {problem.removeprefix('ignored explicit argument ')}"
    return f"{flag}: {problem}"


def _suggestion(parser: argparse.ArgumentParser, flag: str) -> str:
    known = parser._option_string_actions
    if use := megatron_flags.of_other_program(flag):
        return f": {use}"
    if own := same_name(flag.rpartition(".")[2], known):  # as --optimizer.lr
        return f": use {own}"
    return did_you_mean(flag, known) or "; see --help-all for all flags"


# ---- back to a command line ---------------------------------------------------------------------------------------


def to_argv(config: RunConfig) -> list[str]:
    """The shortest command line that `parse` turns into `config`.

    Raises:
        ConfigError: a boolean has a value for which there is no flag.
    """
    from megafp8.config.model_shapes import PRESETS

    words: list[str] = []
    base = with_values(RunConfig(), PRESETS.get(config.model.model_preset or "", {}))
    own = {setting.name: value_of(config, setting.name) for setting in all_settings()}
    base = with_values(base, fp8_lm.level_values(config.precision.fp8_lm_level, own))
    for setting in all_settings():
        value = value_of(config, setting.name)
        if value == value_of(base, setting.name):
            continue
        if setting.is_switch:
            flags = setting.flags if value else setting.off
            if not flags:
                raise ConfigError(f"{setting.name} = {value}: no flag gives this value; use --config")
            words.append(flags[0])
        elif setting.many:
            words.extend([setting.flags[0], *map(str, value)])
        else:
            words.extend([setting.flags[0], str(setting.written(value))])
    return words


# ---- problems -----------------------------------------------------------------------------------------------------


def drop_follow_ups(parsed: ParsedArgs, found: list[str], problems: list[str]) -> list[str]:
    """The problems that rules found, without those that follow from what the parser found.

    Args:
        found: by rules. They see another value than one that the parser could not read, none where an unknown flag or
            key was meant to give it, and no layers where `--hybrid-layer-pattern`, which is refused, gives them.
        problems: found by the parser.
    """
    starts = (re.match(r"(?:\S+:\d+: )?(--[a-z0-9-]+(, --[a-z0-9-]+)*)", problem) for problem in problems)
    misread = {flag for start in starts if start for flag in start[1].split(", ")}
    meant = [_suggested(unknown[1]) for unknown in map(_UNKNOWN.match, problems) if unknown]
    absent = misread.union(*meant)
    if MODEL_PRESET in absent:
        absent |= {flag for each in all_settings() if each.section == "model" for flag in each.flags}
    if any(flag.startswith("--hybrid-") for flag in misread):
        absent.add("--num-layers")
    left = [problem for problem in found if problem.split(" ", 1)[0].rstrip(":") not in misread]
    # Any value may be the one that an unknown flag without a suggestion, or what could not be read, was meant to give.
    is_any_absent = bool(problems) and (parsed.is_unread or not all(meant))
    return [
        problem for problem in left
        if not (_MISSING.search(problem) and (is_any_absent or not absent.isdisjoint(_flags_in(problem))))
    ]  # fmt: skip


def _flags_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z0-9-]+", text))


def _suggested(text: str) -> set[str]:
    """The flags that a suggestion names, also as keys of a configuration file."""
    named = {f"--{word.lstrip('-').replace('_', '-')}" for word in re.findall(r"[\w-]+", text)}
    return named & cached_parser()._option_string_actions.keys() - {"--help-all"}
