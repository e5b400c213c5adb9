"""argv -> Invocation. The parser is built from the schema: one argparse group a section, one option a field.

argparse stops at its first error. So that a user sees every problem at once, the command line is first cut into
options (`--flag` and the words after it), and argparse is given one option at a time. What it makes of them is laid
over the other sources of a value, later ones winning:

    default  <  preset  <  --config file  <  --precision-map file  <  flag

A preset named on the command line together with --config replaces the file's whole model section: a mixture of two
shapes is never what was meant.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Optional

from megafp8 import __version__
from megafp8.config import derived, megatron_flags, model_shapes, settings
from megafp8.config.model_shapes import PRESETS
from megafp8.config.precision_options import read_map
from megafp8.config.schema import AUTO, RunConfig
from megafp8.config.settings import Setting, all_settings, section_titles, value_of, with_values
from megafp8.errors import ConfigError
from megafp8.utils.files import UnreadableFile, path_text, read_text, shown

TARGETS = ("cpu", "h100", "h200", "b200")
_INVOCATION_OPTIONS = ("config", "precision_map_file", "dry_run", "world_size", "target")
_ADDED_UP = ("overrides", "precision.precision_map")
"""Lists to which every spelling adds, where else the last one wins."""
_NEGATIVE_NUMBER = re.compile(r"-\.?\d")


@dataclass(frozen=True)
class Invocation:
    """What one command line asked for."""

    config: RunConfig
    given: frozenset[str]
    """Settings that the command line itself named, for example `model.num_layers`."""
    dry_run: bool = False
    world_size: Optional[int] = None
    """Ranks to plan for, in a dry run; None is those that are there."""
    target: Optional[str] = None
    """Machine to plan for, in a dry run; None is this one."""
    notices: tuple[str, ...] = ()
    """What was accepted without effect, to be shown to the user."""


def parse(argv: Sequence[str]) -> Invocation:
    """Read a command line (without the program's name).

    `--help`, `--version` and `--list-presets` print and exit with status 0.

    Raises:
        ConfigError: all that `read` finds wrong.
    """
    invocation, problems = read(argv)
    if problems:
        raise ConfigError(problems)
    return invocation


def read(argv: Sequence[str]) -> tuple[Invocation, list[str]]:
    """Read a command line as far as it can be read.

    Returns:
        What could be read, and what is wrong: unknown, refused, incomplete or repeated-in-vain flags, bad values, an
        unreadable --config. A caller that has more to check can so report everything at once.
    """
    parser = build_parser()
    expanded, notices = megatron_flags.replace(_options_of(argv))
    values: dict[str, Any] = {}
    problems: list[str] = []
    for option in expanded:
        _read_option(parser, option, values, notices, problems)
    extras = {name: values.pop(name) for name in _INVOCATION_OPTIONS if name in values}
    given = frozenset(values)
    config = _layered(values, extras.get("config"), extras.get("precision_map_file"), notices, problems)
    if extras.get("world_size") is not None and extras["world_size"] < 1:
        problems.append(f"--world-size {extras['world_size']}: must be at least 1")
    invocation = Invocation(
        config=config,
        given=given,
        dry_run=extras.get("dry_run", False),
        world_size=extras.get("world_size"),
        target=extras.get("target"),
        notices=tuple(notices),
    )
    return invocation, problems


# ---- the parser ---------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting on an error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser behind `parse`; also for documentation and shell completion."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        description="Pretrain a GPT in FP8 or BF16 on one rank or many. Flags are Megatron-LM's where it has them.",
        epilog="All problems with a command line are reported together, with exit status 64.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=44, width=120),
    )
    _add_invocation_options(parser)
    groups = {name: parser.add_argument_group(name, title) for name, title in section_titles().items()}
    for setting in all_settings():
        add_setting(groups.get(setting.section) or parser.add_argument_group("overrides"), setting)
    return parser


def _add_invocation_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("invocation", "What to do with the settings.")
    group.add_argument(
        "--config", type=path_text, metavar="FILE", help="start from the settings in this JSON file (flags win)"
    )
    group.add_argument(
        "--precision-map",
        dest="precision_map_file",
        type=path_text,
        metavar="FILE",
        help="YAML with recipes by linear and GEMM, before those of --precision (see docs/precision.md)",
    )
    group.add_argument("--dry-run", action="store_true", help="check everything, print the plan of the run and stop")
    group.add_argument("--world-size", type=_whole_number, metavar="N", help="ranks to plan for, with --dry-run")
    group.add_argument("--target", choices=TARGETS, help="machine to plan for, with --dry-run")
    group.add_argument("--list-presets", action=_ListPresets, nargs=0, help="print the model presets and exit")
    group.add_argument("--version", action="version", version=f"megafp8 {__version__}")


def add_setting(group: Any, setting: Setting) -> None:
    """Add the flags of a setting to an argparse group; the value is under the setting's `section.field` name."""
    help_text = _help_of(setting)
    if setting.type is bool and not setting.many:
        if setting.flags:
            note = help_text if not setting.default else f"{setting.help} (always on; accepted as confirmation)"
            group.add_argument(*setting.flags, dest=setting.name, action="store_true", help=note)
        if setting.off:
            group.add_argument(
                *setting.off,
                dest=setting.name,
                action="store_false",
                help=f"turn off: {setting.help}".replace("%", "%%"),
            )
        return
    options: dict[str, Any] = {"dest": setting.name, "type": _converter(setting), "help": help_text}
    if setting.choices:
        options["choices"] = (*setting.choices, None) if setting.optional else setting.choices
        options["metavar"] = f"{{{','.join(map(str, setting.choices))}}}"
    else:
        options["metavar"] = setting.metavar or {int: "N", float: "X", str: "TEXT"}[setting.type]
    if setting.many:
        # Megatron's last spelling of a list wins; overrides name different fields, so they add up.
        options.update(nargs="+", action="extend" if setting.name in _ADDED_UP else "store")
    group.add_argument(*setting.flags, **options)


def _help_of(setting: Setting) -> str:
    shown = " ".join(map(str, setting.default)) if setting.many else setting.default
    text = setting.help
    if setting.type is not bool and setting.default not in (None, ()) and "default" not in text:
        text += f" (default: {shown})"
    return text.replace("%", "%%")


def _converter(setting: Setting) -> Any:
    convert = {float: _number, int: _whole_number, str: str}[setting.type]
    # `none`, so that a flag can take back what a --config file or a preset gives.
    words = ({"none": None} if setting.optional else {}) | ({"auto": AUTO} if setting.auto else {})

    def read(text: str) -> Any:
        if text in words:
            return words[text]
        value = convert(text)
        if fault := setting.fault(value):
            raise argparse.ArgumentTypeError(f"{shown(text)} {fault}")
        if setting.auto and value == AUTO:
            raise argparse.ArgumentTypeError(f"{text} must be at least 1, or auto")
        return value

    return read


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


class _ListPresets(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        sys.stdout.write(_preset_table())
        raise SystemExit(0)


def _preset_table() -> str:
    lines = [
        f"{'preset':<12}{'layers':>7}{'hidden':>8}{'heads':>7}{'kv':>5}{'ffn':>8}{'vocabulary':>13}{'parameters':>13}\n"
    ]
    for name, values in PRESETS.items():
        model = with_values(RunConfig(), values).model
        vocabulary = str(model.vocab_size) if model.vocab_size else "tokenizer's"
        padded = derived.padded_vocab_size(RunConfig(), model.vocab_size or 0)
        total_millions = model_shapes.count_parameters(model, padded).total / 1e6
        suffix = "M" if model.vocab_size else "M + vocab"
        lines.append(
            f"{name:<12}{model.num_layers:>7}{model.hidden_size:>8}{model.num_attention_heads:>7}"
            f"{derived.num_query_groups(model):>5}{derived.ffn_hidden_size(model):>8}{vocabulary:>13}"
            f"{total_millions:>12,.1f}{suffix}\n"
        )
    return "".join(lines)


# ---- one option at a time -----------------------------------------------------------------------------------------


def _options_of(argv: Sequence[str]) -> list[list[str]]:
    """The command line cut before every word that starts an option; `--flag=value` becomes two words."""
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


def _read_option(
    parser: argparse.ArgumentParser, option: list[str], values: dict[str, Any], notices: list[str], problems: list[str]
) -> None:
    flag, words = option[0], option[1:]
    if not flag:
        problems.append(f"{words[0]!r} belongs to no flag")
        return
    if flag not in parser._option_string_actions:
        verdict = megatron_flags.classify(flag, words)
        if verdict is None:
            problems.append(f"unknown flag {flag}{_nearest(parser, flag)}")
        else:
            (notices if verdict.accepted else problems).append(verdict.text)
        return
    # A value such as -1e-3 would read as an option; joined to its flag it cannot.
    joined = [f"{flag}={words[0]}"] if len(words) == 1 and words[0].startswith("-") else option
    try:
        namespace, left_over = parser.parse_known_args(joined)
    except ConfigError as error:
        problems.append(_plain(flag, error.problems[0]))
        return
    if left_over:
        problems.append(f"{flag}: does not take {' '.join(map(repr, left_over))}")
    for name, value in vars(namespace).items():
        if isinstance(value, list):
            earlier = values.get(name, ()) if name in _ADDED_UP else ()
            value = (*earlier, *value)
        values[name] = value


def _plain(flag: str, text: str) -> str:
    """argparse's message in our words: the flag as it was spelled, then what is wrong."""
    _, _, fault = text.removeprefix("argument ").partition(": ")
    if fault.startswith(("expected one argument", "expected at least one argument")):
        fault = "a value is missing after it"
    if fault.startswith("ignored explicit argument"):
        fault = f"does not take {fault.removeprefix('ignored explicit argument ')}"
    return f"{flag}: {fault}"


def _nearest(parser: argparse.ArgumentParser, flag: str) -> str:
    import difflib  # only on the way to an error: keeps --help quick

    near = difflib.get_close_matches(flag.replace("_", "-"), parser._option_string_actions, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else "; see --help for all flags"


# ---- sources of a value -------------------------------------------------------------------------------------------


def _layered(
    values: dict[str, Any], path: Optional[str], map_path: Optional[str], notices: list[str], problems: list[str]
) -> RunConfig:
    """Defaults, then preset, then files, then flags."""
    from_file = _read_config(path, problems) if path is not None else {}
    named = values.get("model.model_preset")
    if named is not None and any(name.startswith("model.") for name in from_file):
        from_file = {name: value for name, value in from_file.items() if not name.startswith("model.")}
        notices.append(f"--model-preset {named} replaces the model section of --config {path}")
    preset = named if named is not None else from_file.get("model.model_preset")
    if preset is not None and preset not in PRESETS:
        problems.append(f"--model-preset {preset}: no such preset; there are {', '.join(PRESETS)}")
        preset = None
    config = with_values(RunConfig(), PRESETS[preset]) if preset is not None else RunConfig()
    config = with_values(config, from_file)
    if map_path is not None:
        values["precision.precision_map"] = (
            *_read_precision_map(map_path, problems),
            *values.get("precision.precision_map", ()),
        )
    for name in set(_ADDED_UP) & set(values):
        values[name] = (*value_of(config, name), *values[name])
    return with_values(config, values)


def _read_precision_map(path: str, problems: list[str]) -> tuple[str, ...]:
    try:
        return read_map(path)
    except ConfigError as error:
        problems.extend(error.problems)
        return ()


def _read_config(path: str, problems: list[str]) -> dict[str, Any]:
    try:
        return settings.read_settings(read_text(path))
    except ConfigError as error:
        problems.extend(f"--config {path}: {problem}" for problem in error.problems)
    except UnreadableFile as error:
        problems.append(f"--config {path}: cannot be read: {error.reason}")
    return {}


# ---- back to a command line ---------------------------------------------------------------------------------------


def to_argv(config: RunConfig) -> list[str]:
    """The shortest command line that `parse` reads back as `config` (with the preset's fields spelled out).

    Raises:
        ConfigError: a setting has a value that no flag can give (a boolean without a flag for it).
    """
    words: list[str] = []
    base = with_values(RunConfig(), PRESETS.get(config.model.model_preset or "", {}))
    for setting in all_settings():
        value = value_of(config, setting.name)
        if value == value_of(base, setting.name):
            continue
        if setting.type is bool and not setting.many:
            spellings = setting.flags if value else setting.off
            if not spellings:
                raise ConfigError(f"{setting.name} = {value}: no flag gives this value; use --config")
            words.append(spellings[0])
        elif setting.many:
            words.extend([setting.flags[0], *map(str, value)])
        else:
            words.extend([setting.flags[0], str(setting.written(value))])
    return words
