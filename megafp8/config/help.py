"""Help on the training flags: the common ones, those of a group, all of them, or everything about one.

All texts follow from the declarations in `config/schema/`. `config/flags.py` gives the parser, for the few options
that are no settings.
"""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Optional

from megafp8.config import megatron_flags
from megafp8.config.megatron_flags.replaced import REPLACED
from megafp8.config.schema.setting import COMMON, OWN, Audience
from megafp8.config.settings import Setting, all_settings
from megafp8.errors import ConfigError
from megafp8.recipes import registry
from megafp8.utils.suggestions import closest

WIDTH, COLUMN = 100, 40
NO_LIMIT = 1e12  # limits of numbers from here on only keep arithmetic safe
MOST_CHOICES = 80  # characters, in the short help
GENERAL = "general"
GROUPS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "model": ("shape of the GPT", "hugging_face.md"),
        "rotary embedding": ("rotary position embeddings and YaRN", ""),
        "experts": ("mixture-of-experts layers", "mixture_of_experts.md"),
        "latent attention": ("multi-latent attention of DeepSeek", ""),
        "multi-token prediction": ("further layers that predict later tokens", "mixture_of_experts.md"),
        "mup": ("maximal update parametrization: settings that fit all widths", "hyperparameters.md"),
        "data": ("tokenizer and token shards", "data.md"),
        "precision": ("number formats and recipes", "recipes.md"),
        "gradient reduction": ("precision of the gradients between ranks", "fp8_lm.md"),
        "training": ("batch, length and validation", ""),
        "optimizer": ("optimizer and learning rate", ""),
        "muon": ("the optimizer Muon", "muon.md"),
        "parallel": ("how ranks share the work", "parallelism.md"),
        "recomputation": ("activation memory: recomputation and offloading", ""),
        "speed": ("kernels, fusions and CUDA graphs", "performance.md"),
        "checkpoint": ("saving and loading", "checkpoints.md"),
        "reliability": ("timeouts, signals, bad numbers, spikes", "reliability.md"),
        "logging": ("console, TensorBoard, statistics, profiles", "observability.md"),
        GENERAL: ("configuration files, dry runs and help", ""),
    }
)
"""Topics of `--help TOPIC` in the order of use: what the flags are for, and the page of docs/ about them."""
OTHER_NAMES = MappingProxyType(
    {
        "moe": "experts",
        "mla": "latent attention",
        "mtp": "multi-token prediction",
        "rope": "rotary embedding",
        "yarn": "rotary embedding",
        "parallelism": "parallel",
        "checkpoints": "checkpoint",
        "performance": "speed",
    }
)
PRECISION_OPTIONS = ("--recipe", "--precision-map")
COMMON_OPTIONS = ("--recipe", "--config", "--dry-run", "--world-size", "--target")
"""Options that are no settings: those of the topic precision, the others being general, and those of the short help."""
SECTIONS = ("model", "data", "precision", "training", "optimizer", "parallel", "checkpoint", "logging")
"""Sections in the order of the short help."""

USAGE = """\
usage: megafp8 pretrain --model-preset NAME --data-path PREFIX ... [flags]
       megafp8 pretrain CONFIG.yaml [flags]

Pretrain a GPT in BF16, FP8 or FP4, on one device or under torchrun, with Megatron-LM's flags.
"""
EXAMPLES = f"""\
  megafp8 pretrain --model-preset tiny --seq-length 64 --micro-batch-size 8 --train-iters 50 --lr 1e-3 \\
    --recipe {registry.DEFAULT_FP8} --mock-data --tokenizer-type NullTokenizer --vocab-size 255
  megafp8 pretrain ... --dry-run --world-size 64 --target h100   # is it right, does it fit, how fast?
"""
MARKS = {Audience.DEPRECATED: "[deprecated] ", Audience.TESTS: "[for tests and comparisons] "}


def requested_topic(argv: Sequence[str]) -> Optional[str]:
    """The topic of the first `--help` of a command line: empty for the short help; None without one.

    It is the next word if that is a flag, else all words up to the next flag.
    """
    for index, word in enumerate(argv):
        if word == "--help-all":
            return "all"
        if word in ("-h", "--help"):
            flag, *_ = after = [*argv[index + 1 :], ""]
            if flag.startswith("-"):
                return flag
            end = next(place for place, other in enumerate(after) if other.startswith("-") or not other)
            return " ".join(after[:end])
        if word.startswith("--help="):
            return word.partition("=")[2]
    return None


def help_text(topic: str, parser: argparse.ArgumentParser) -> str:
    """The help on a topic: empty, `all`, a group or a flag, with or without dashes; else all flags with that word.

    Raises:
        ConfigError: nothing is named like that.
    """
    if not topic:
        return _short_help(parser)
    if topic == "all":
        return USAGE + "".join(_group_help(group, parser) for group in GROUPS)
    words = topic.strip("-").lower().replace("_", "-")
    groups = {name.replace(" ", "-"): name for name in GROUPS} | OTHER_NAMES
    if words.replace(" ", "-") in groups:
        return _group_help(groups[words.replace(" ", "-")], parser).lstrip("\n")
    if text := _flag_help(f"--{words}", parser):
        return text
    if found := [each for each in _shown() if any(words in flag for flag in (*each.flags, *each.off))]:
        return f"flags with {words!r}:\n{_table(map(_row, found))}"
    flags = (flag.strip("-") for each in _shown() for flag in (*each.flags, *each.off))
    near = closest(words, [*flags, *GROUPS, *OTHER_NAMES], similarity=0.6)
    hint = f"did you mean --help {near[0]}?" if near else f"groups: {', '.join(GROUPS)}"
    raise ConfigError(f"--help {topic}: no flag and no group of flags; {hint}")


def _short_help(parser: argparse.ArgumentParser) -> str:
    lines = [f"{USAGE}\nexamples:\n{EXAMPLES}"]
    for section in (*SECTIONS, GENERAL):
        common = [each for each in _shown() if each.audience is COMMON and each.section == section]
        common.sort(key=lambda each: each.group != section)  # the section's own before those of its base classes
        options = [
            (names, text.partition(";")[0])
            for names, text in option_rows(parser, section)
            if names.split()[0] in COMMON_OPTIONS
        ]
        rows = [*options, *((_names(each, True), _brief(each)) for each in common)]
        lines.append(f"{section}:\n{_table(rows)}")
    counts = Counter(each.group for each in _shown())
    groups = ", ".join(f"{name} ({counts[name]})" for name in GROUPS if name != GENERAL)
    more = f"More: --help GROUP, --help FLAG, or --help-all for all {sum(counts.values())} flags. Groups: {groups}."
    return "".join(lines) + "\n" + textwrap.fill(more, WIDTH, break_on_hyphens=False) + "\n"


def _group_help(group: str, parser: argparse.ArgumentParser) -> str:
    title, page = GROUPS[group]
    rows = [*option_rows(parser, group), *(_row(each) for each in _shown() if each.group == group)]
    return f"\n{group}: {title}{f' (docs/{page})' if page else ''}\n{_table(rows)}"


def _flag_help(flag: str, parser: argparse.ArgumentParser) -> str:
    """Everything about one flag; empty if there is none of this name, in Megatron-LM neither."""
    found = next((each for each in all_settings() if flag in (*each.flags, *each.off)), None)
    if found is not None and found.former:
        return f"{flag} is gone: {found.former}\n"
    if found is not None:
        facts = "".join(f"  {name:<13}{value}\n" for name, value in flag_facts(found).items())
        text = textwrap.fill(description(found), WIDTH, initial_indent="  ", subsequent_indent="  ")
        return f"{_names(found)}\n{text}\n\n{facts}"
    if rows := [row for row in option_rows(parser) if flag in row[0].replace(",", "").split()]:
        return _table(rows)
    if new := REPLACED.get(flag):
        return f"{flag} of Megatron-LM is read as {new}\n"
    verdict = megatron_flags.classify(flag, [])
    return f"A flag of Megatron-LM. {verdict.text}\n" if verdict else ""


def _shown() -> Iterator[Setting]:
    return (each for each in all_settings() if not each.former)


def flag_facts(setting: Setting) -> dict[str, str]:
    """What is known about a setting beside its description, as names and texts."""
    needs = " and ".join(filter(None, (setting.requires, setting.needs)))
    facts = {
        "value": _value_text(setting),
        "default": default_text(setting) or "none",
        "needs": f"{needs} ({'refused' if setting.requires else 'no effect'} without it)" if needs else "",
        "Megatron-LM": megatron_meaning(setting),
        "in a file": setting.name,
        "group": setting.group,
        "note": setting.audience.value if setting.audience in MARKS else "",
    }
    return {name: text for name, text in facts.items() if text}


def description(setting: Setting) -> str:
    """The help of a setting, with the recipes that have it."""
    recipes = registry.with_setting(setting.field) if setting.section == "precision" else ()
    text = f"do not {setting.help}" if setting.off and not setting.flags else setting.help
    return f"{text} ({', '.join(recipes)} only)" if recipes else text


def default_text(setting: Setting) -> str:
    """What a run uses without the flag; empty for nothing."""
    if setting.unset or setting.default in (None, ()):
        return setting.unset
    if setting.is_switch:
        return "on" if setting.default and setting.flags else "off"  # of the flag, which may turn a setting off
    values = setting.default if setting.many else (setting.default,)
    return " ".join(f"{value:.12g}" if isinstance(value, float) else str(value) for value in values)


def megatron_meaning(setting: Setting) -> str:
    """What a flag is in Megatron-LM: the same, something else, or no flag."""
    if setting.megatron == OWN:
        return "no such flag"
    return f"differs: {setting.megatron}" if setting.megatron else "the same"


def value_name(setting: Setting, brief: bool = False) -> str:
    """Name of the value of a flag: `{a,b}` for choices, or, if brief, the last word of the field's name."""
    if setting.choices and not brief:
        return f"{{{','.join(map(str, setting.choices))}}}"
    if setting.metavar or setting.unit:
        return setting.metavar or setting.unit.upper()
    last_word = setting.field.rpartition("_")[2].upper() if "_" in setting.field else "NAME"
    return last_word if setting.choices else {int: "N", float: "X", str: "TEXT"}[setting.type]


def _value_text(setting: Setting) -> str:
    if setting.is_switch:
        return "none: the flag is a switch"
    kind = {int: "whole number", float: "number", str: "path" if setting.is_path else "text"}[setting.type]
    parts = [f"one of {', '.join(map(str, setting.choices))}" if setting.choices else kind]
    if setting.unit:
        parts[0] += f" of {setting.unit}" if setting.unit != "step" else ", a step"
    if setting.range is not None and setting.range.low > -NO_LIMIT:
        is_limited = setting.range.high is not None and setting.range.high < NO_LIMIT
        parts.append(str(setting.range if is_limited else replace(setting.range, high=None)))
    if setting.auto:
        parts.append("or auto")
    return ("one or more: " if setting.many else "") + ", ".join(parts)


def _names(setting: Setting, brief: bool = False) -> str:
    """The flags of a setting with the name of the value: `--lr X`, `--use-nccl-ub, --no-use-nccl-ub`."""
    names = ", ".join((*setting.flags, *setting.off) if not brief else (*setting.flags, *setting.off)[:1])
    return names if setting.is_switch else f"{names} {value_name(setting, brief)}{' ...' if setting.many else ''}"


def _row(setting: Setting) -> tuple[str, str]:
    """A line of a group."""
    return _names(setting), complete_text(setting)


def complete_text(setting: Setting, with_choices: bool = False) -> str:
    """Mark, description and default of a setting, and the choices where the name of the value does not have them."""
    default = default_text(setting)
    if setting.is_switch and not setting.unset:
        # A switch does what its help says; its default is news only where it is on.
        default = "on" if setting.default and setting.flags else ""
    text = f"{MARKS.get(setting.audience, '')}{description(setting)}"
    if with_choices and setting.choices:
        text += f"; one of {', '.join(map(str, setting.choices))}"
    return f"{text} (default: {default})".replace(") (", "; ") if default else text


def _brief(setting: Setting) -> str:
    """The first clause of the description, choices if they are few, and the default if it takes no further line."""
    text = setting.help.partition(";")[0]
    choices = ", ".join(f"{each} (default)" if each == setting.default else str(each) for each in setting.choices)
    if choices and len(text + choices) <= MOST_CHOICES:
        return f"{text}: {choices}"
    default = "" if setting.type is bool else default_text(setting)
    complete = f"{text} (default: {default})"
    return complete if default and len(complete) <= WIDTH - COLUMN else text


def option_rows(parser: argparse.ArgumentParser, group: Optional[str] = None) -> list[tuple[str, str]]:
    """Lines of the options that are no settings, all or those of a group."""
    rows = []
    for action in parser._actions:
        own_group = "precision" if action.option_strings[0] in PRECISION_OPTIONS else GENERAL
        if "." not in action.dest and action.dest != "overrides" and group in (None, own_group):
            value = action.metavar or ("" if action.nargs == 0 else f"{{{','.join(action.choices or ())}}}")
            rows.append((f"{', '.join(action.option_strings)} {value}".strip(), action.help or ""))
    return rows


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """Two columns: flags, and wrapped texts, which begin on a line of their own beside long flags."""
    lines = []
    for names, text in rows:
        wrapped = textwrap.wrap(text, WIDTH - COLUMN, break_on_hyphens=False)
        if len(names) + 4 > COLUMN:
            lines += textwrap.wrap(names, WIDTH - 2, initial_indent="  ", subsequent_indent="      ")
        else:
            first = wrapped.pop(0) if wrapped else ""
            lines.append(f"  {names:<{COLUMN - 2}}{first}")
        lines += [" " * COLUMN + line for line in wrapped]
    return "".join(f"{line.rstrip()}\n" for line in lines)
