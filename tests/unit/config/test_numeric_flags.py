"""Numbers on the command line: plain ASCII decimals, in sane ranges, for every flag of every command."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

import pytest

from megafp8.cli.subcommands import SUBCOMMANDS
from megafp8.config import flags
from megafp8.config.attention_layers import window_size
from megafp8.config.batch_schedule import step_schedule
from megafp8.config.data_blend import parse_blend
from megafp8.config.derived import split_shares
from megafp8.config.precision_schedule import parse_schedule
from megafp8.config.rules import setting_problems
from megafp8.config.schema import ModelConfig
from megafp8.config.settings import Setting, all_settings
from megafp8.errors import ConfigError
from megafp8.launch.job import build_job, check_job
from megafp8.launch.study import read_number
from megafp8.metrics.recipe_comparison import sample_distribution
from megafp8.utils.numbers import number, whole_number

NUMERIC = [setting for setting in all_settings() if setting.type in (int, float) and not setting.former]
NOT_PLAIN = ("٣", "４", "1_000", "+5", " 4", "4 ", "4\n", "0x10", "", "-", "1e", "nan", "-inf", "1e400", "9" * 65)
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --bf16 --train-iters 10 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 60"
)
MODELS = {
    "rope": f"{MODEL} --position-embedding-type rope --swiglu",
    "latent": f"{MODEL} --position-embedding-type yarn --multi-latent-attention",
    "mixture": f"{MODEL} --num-experts 4 --moe-expert-capacity-factor 1",
}


def study_number(text: str) -> None:
    problems: list[str] = []
    read_number(text, "gpus", problems)
    if problems:
        raise ConfigError(problems)


# Numbers within a text, which have parsers of their own.
IN_TEXT = {
    parse_schedule: "bf16:{},fp8", lambda text: step_schedule(text, 1): "0:4 {}:8", split_shares: "{},1,1",
    lambda text: parse_blend(text.split(",")): "1,a,{},b", sample_distribution: "normal:3x{}",
    lambda text: window_size(ModelConfig(window_size=text)): "{},0",
    lambda text: check_job(build_job({"name": "a", "time": text}), needs_save=False): "{}-00:00:00", study_number: "{}",
}  # fmt: skip


def flag_of(setting: Setting) -> str:
    return setting.flags[0]


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


@pytest.mark.parametrize("setting", NUMERIC, ids=flag_of)
def test_a_setting_takes_plain_decimals_only(setting: Setting) -> None:
    for text in NOT_PLAIN:
        with pytest.raises(ConfigError, match=flag_of(setting)):
            flags.parse([f"{flag_of(setting)}={text}"])


@pytest.mark.parametrize("name", [name for name in SUBCOMMANDS if name not in ("pretrain", "build-index")])
def test_a_command_takes_plain_decimals_only(name: str) -> None:
    module = importlib.import_module(f"megafp8.cli.{name.replace('-', '_')}")
    for parser in parsers_of(module.build_parser()):
        for action in parser._actions:
            if action.type in (int, float):
                assert parser._get_value(action, "4") == 4
                for text in NOT_PLAIN:
                    with pytest.raises(argparse.ArgumentError):
                        parser._get_value(action, text)


@pytest.mark.parametrize("parse", IN_TEXT)
def test_numbers_within_a_text_are_plain_decimals(parse) -> None:
    parse(IN_TEXT[parse].format("4"))
    for text in ("٣", "1_000"):
        with pytest.raises(ValueError):
            parse(IN_TEXT[parse].format(text))


def test_what_numbers_may_look_like() -> None:
    assert [number(text) for text in ("4", "-4.5", "1e-3", ".5", "5.", "1E+3")] == [4, -4.5, 1e-3, 0.5, 5, 1000]
    assert [whole_number(text) for text in ("0", "-12", "007")] == [0, -12, 7]
    with pytest.raises(argparse.ArgumentTypeError, match="'1_000' is not an integer: write it in the digits 0 to 9"):
        whole_number("1_000")
    for text in ("1e5", "5."):
        with pytest.raises(argparse.ArgumentTypeError, match="write all digits, without point or exponent"):
            whole_number(text)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sign", ["", "-"])
def test_no_setting_takes_a_number_beyond_all_use(model: str, sign: str) -> None:
    """Nor does a rule fail on one."""
    for setting in NUMERIC:
        value = f"{sign}1e308" if setting.type is float else f"{sign}{setting.maximum}"
        parsed, problems = flags.parse_with_problems([*MODELS[model].split(), flag_of(setting), value])
        found = [*problems, *setting_problems(parsed.config, 1)]
        is_refused = any(flag_of(setting) in problem for problem in found)
        assert is_refused or (setting.type is int and not sign), f"{flag_of(setting)} {value} is accepted"
