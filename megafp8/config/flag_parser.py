"""The argparse parser of the training flags, built from the schema, and the few options that are no settings."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from megafp8 import __version__
from megafp8.config import dimensions, model_shapes, recipe_values
from megafp8.config import help as flag_help
from megafp8.config.gpu_names import gpu_type
from megafp8.config.schema import AUTO, RunConfig
from megafp8.config.settings import Setting, all_settings, with_values
from megafp8.errors import ConfigError
from megafp8.recipes import registry
from megafp8.utils.files import path_text, printable
from megafp8.utils.numbers import number, whole_number
from megafp8.utils.suggestions import NameType, did_you_mean, same_name

ACCUMULATED = ("overrides", "precision.precision_map", "logging.sample_prompt")
"""List settings to which every occurrence adds. Of the others the last occurrence wins."""


class FlagParser(argparse.ArgumentParser):
    """Argument parser that raises on an error instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    """The argparse parser of all flags. `config/help.py` writes its help."""
    parser = FlagParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    _add_general_options(parser)
    for setting in (each for each in all_settings() if not each.former):
        add_setting(parser, setting)
    return parser


cached_parser = functools.lru_cache(maxsize=1)(build_parser)
"""The parser, built once: that takes 30 ms. Parsing does not change it."""


def _add_general_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=path_text, metavar="FILE", help="read settings from this YAML or JSON file; it may also be "
        "the first word, and flags override it (see docs/configs.md)",
    )  # fmt: skip
    parser.add_argument(
        "--recipe", type=NameType(recipe_values.names(), "recipes"), metavar="NAME",
        help="recipe with its tested options: "
        f"{', '.join(recipe_values.names())}; sets defaults of other flags, and --bf16 (see docs/recipes.md)",
    )  # fmt: skip
    parser.add_argument(
        "--precision-map", dest="precision_map_file", type=path_text, metavar="FILE",
        help="YAML file with recipes of linear layers and GEMMs; entries of --precision take precedence (see "
        "docs/precision.md)",
    )  # fmt: skip
    parser.add_argument(
        "--num-epochs", type=positive_number, metavar="N",
        help="length of the run in passes over the training data, instead of --train-iters, which it sets",
    )  # fmt: skip
    parser.add_argument(
        "--min-lr-ratio", type=fraction, metavar="R", help="final learning rate over --lr, instead of --min-lr"
    )
    parser.add_argument("--dry-run", action="store_true", help="check all settings, print the plan of the run and exit")
    parser.add_argument(
        "--world-size", type=whole_number, metavar="N", help="number of ranks to plan for, with --dry-run"
    )
    parser.add_argument(
        "--target", type=gpu_type("cpu", kind="machines"), metavar="NAME",
        help="machine to plan for, with --dry-run: cpu, or a GPU of megafp8 plan --help",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-memory-gib", type=positive_number, metavar="GIB", help="memory of the --target GPU, for one like it"
    )
    parser.add_argument(
        "--gpu-peak-tflops", type=positive_number, metavar="X",
        help="dense BF16 peak of the --target GPU, for one like it; those of other formats change in proportion",
    )  # fmt: skip
    parser.add_argument(
        "--strict", action="store_true", help="with --dry-run: exit status 1 if the run does not fit into the memory"
    )
    parser.add_argument("--list-presets", action=_ListPresets, nargs=0, help="print the model presets and exit")
    parser.add_argument("-h", "--help", nargs="*", metavar="TOPIC", help="this help, or all about a group or a flag")
    parser.add_argument("--help-all", action="store_true", help="print all flags and exit")
    parser.add_argument("--version", action="version", version=f"megafp8 {__version__}")


def positive_number(text: str) -> float:
    """A number above 0."""
    if (value := number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{printable(text)} must be above 0")
    return value


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    if not 0 <= (value := number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{printable(text)} must be from 0 to 1")
    return value


def add_setting(group: Any, setting: Setting) -> None:
    """Add the flags of a setting to an argparse group. Their `dest` is the setting's `section.field` name."""
    help_text = flag_help.description(setting).replace("%", "%%")
    if setting.is_switch:
        if setting.flags:
            group.add_argument(*setting.flags, dest=setting.name, action="store_true", help=help_text)
        if setting.off:
            off_text = f"disable {setting.flags[0]}" if setting.flags else help_text
            group.add_argument(*setting.off, dest=setting.name, action="store_false", help=off_text)
        return
    options: dict[str, Any] = {
        "dest": setting.name, "type": _converter(setting), "metavar": flag_help.value_name(setting, brief=True),
        "help": flag_help.complete_text(setting, with_choices=True).replace("%", "%%"),
    }  # fmt: skip
    if setting.many:
        options.update(nargs="+", action="extend" if setting.name in ACCUMULATED else "store")
    group.add_argument(*setting.flags, **options)


def _converter(setting: Setting) -> Callable[[str], Any]:
    converters: dict[type, Callable[[str], Any]] = {float: number, int: whole_number, str: str}
    convert, known = converters[setting.type], [str(choice) for choice in setting.choices]
    # `none` lets a flag reset what a --config file or a preset gives.
    words = ({"none": None} if setting.optional else {}) | ({"auto": AUTO} if setting.auto else {})

    def read(text: str) -> Any:
        if text in words:
            return words[text]
        value = convert(same_name(text, known) or text)
        if hint := registry.family_hint(text, setting.choices):
            raise argparse.ArgumentTypeError(hint)
        if setting.choices and value not in setting.choices:
            near = did_you_mean(text, known)
            raise argparse.ArgumentTypeError(
                f"invalid choice: {text!r}{near} (choose from {', '.join([*known, *words])})"
            )
        if problem := setting.problem(value):
            raise argparse.ArgumentTypeError(f"{printable(text)} {problem}".strip())
        if setting.auto and value == AUTO:
            raise argparse.ArgumentTypeError(f"{text} must be at least 1, or auto")
        return value

    return read


class _ListPresets(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        sys.stdout.write(preset_table())
        raise SystemExit(0)


def preset_table() -> str:
    """One line for each preset: shape and number of parameters."""
    lines = [
        f"{'preset':<18}{'layers':>7}{'hidden':>8}{'heads':>7}{'kv':>5}{'ffn':>8}{'vocabulary':>13}{'parameters':>13}\n"
    ]
    for name, values in model_shapes.PRESETS.items():
        model = with_values(RunConfig(), values).model
        vocabulary = str(model.vocab_size) if model.vocab_size else "tokenizer's"
        padded = dimensions.padded_vocab_size(RunConfig(), model.vocab_size or 0)
        total_millions = model_shapes.count_parameters(model, padded).total / 1e6
        suffix = "M" if model.vocab_size else "M + vocab"
        lines.append(
            f"{name:<18}{model.num_layers:>7}{model.hidden_size:>8}{model.num_attention_heads:>7}"
            f"{dimensions.num_query_groups(model):>5}{dimensions.ffn_hidden_size(model):>8}{vocabulary:>13}"
            f"{total_millions:>12,.1f}{suffix}\n"
        )
    return "".join(lines)
