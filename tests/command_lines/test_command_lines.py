"""Command lines of Megatron-LM: a few in full, every flag of its parser, and what the documentation says about them."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
from command_line_corpus import (
    MOST_IN_CI,
    Line,
    ParserFlag,
    choose_cover,
    dry_run,
    read_cover,
    read_lines,
    read_parser_flags,
    read_verdicts,
)
from sweep import of_recorded_gpus, pass_rates

from megafp8.config import flags
from megafp8.config.schema.setting import OWN
from megafp8.config.settings import Setting, all_settings

LINES, VERDICTS, FLAGS = read_lines(), read_verdicts(), read_parser_flags()
ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/from_megatron_lm.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "benchmarks/results/megatron_lm_compatibility.md").read_text(encoding="utf-8")

# Equal in effect, though the settings are written differently.
SAME_DEFAULTS = {
    "--attention-backend": "Megatron-LM's is an enumeration",
    "--cross-entropy-fusion-impl": "only used with the fusion, whose default is in the table",
    "--cp-comm-type": "a list in Megatron-LM",
    "--data-path": "none",
    "--hierarchical-context-parallel-sizes": "none",
    "--moe-aux-loss-coeff": "a list here, of one value by default",
    "--moe-layer-freq": "a text here",
    "--moe-router-load-balancing-type": "a list here, of one value by default",
    "--rampup-batch-size": "none",
    "--step-batch-size-schedule": "none",
    "--yarn-beta-fast": "32 is chosen later",
    "--yarn-beta-slow": "1 is chosen later",
    "--yarn-correction-range-round-to-int": "on is chosen later",
    "--dataloader-type": "Megatron-LM chooses it later",
    "--no-load-optim": "off",
    "--no-load-rng": "off",
    "--no-save-optim": "off",
    "--no-save-rng": "off",
    "--non-persistent-ckpt-type": "only used with an interval",
    "--profile-ranks": "Megatron-LM chooses rank 0 later",
    "--recompute-modules": "core_attn is chosen later",
    "--test-data-path": "none",
    "--tiktoken-num-special-tokens": "1000 is chosen later",
    "--train-data-path": "none",
    "--untie-embeddings-and-output-weights": "the setting is the opposite of the flag",
    "--valid-data-path": "none",
}


@pytest.mark.parametrize("number", read_cover())
def test_a_command_line_passes_its_dry_run(number: int) -> None:
    verdict = dry_run(LINES[number])
    assert verdict.status == 0, f"{LINES[number].source}: {verdict.reason}"


def test_the_lines_in_ci_are_the_recorded_choice() -> None:
    assert read_cover() == choose_cover(LINES, VERDICTS)
    assert 1 < len(read_cover()) <= MOST_IN_CI


def test_every_line_has_a_verdict() -> None:
    assert [verdict.number for verdict in VERDICTS] == [line.number for line in LINES]
    assert all(bool(verdict.reason) == bool(verdict.status) for verdict in VERDICTS)


def test_no_flag_of_the_parser_is_unknown() -> None:
    spellings = [[name, *values_of(flag)] for flag in FLAGS for name in flag.flags]
    problems = flags.parse_with_problems([word for words in spellings for word in words])[1]
    wrong = re.compile(r"unknown flag|does not belong|: (takes|does not take|a value is missing)")
    assert [problem for problem in problems if wrong.search(problem)] == []
    assert len(FLAGS) == 838


def values_of(flag: ParserFlag) -> list[str]:
    """As many values as Megatron-LM's parser expects."""
    return ["1"] * (1 if flag.nargs in (None, "+", "*") else int(flag.nargs))


def test_the_default_of_a_flag_is_never_refused() -> None:
    """Scripts that spell out Megatron-LM's defaults run."""
    refused = set()
    for flag in FLAGS:
        default = default_of(flag)
        if flag.nargs != "0" and default not in (None, ()) and "<" not in str(default):
            words = map(str, default) if isinstance(default, tuple) else [str(default)]
            if flags.parse_with_problems([flag.flags[0], *words])[1]:
                refused.add(flag.flags[0])
    assert refused == set()


def test_a_flag_of_nobody_is_unknown() -> None:
    assert "unknown flag" in flags.parse_with_problems(["--no-such-flag", "1"])[1][0]


def test_the_documents_have_the_pass_rates() -> None:
    rates = pass_rates(LINES, VERDICTS)
    stated = {
        family: (int(passed), int(count))
        for family, passed, count in re.findall(r"^\| (\w+)[^|]*\| (\d+) of (\d+) \|", RESULTS, re.MULTILINE)
    }
    assert stated == rates
    passed, count = (sum(column) for column in zip(*rates.values(), strict=True))
    assert f"Of {count} command lines of Megatron-LM's own tests and examples, {passed} run unchanged" in DOCUMENT


def test_the_document_has_the_rates_on_the_gpus_of_the_records() -> None:
    rows = re.findall(r"^\| (\w+)[^|]*\| \d+ of \d+ \| (\d+) of (\d+) \|", RESULTS, re.MULTILINE)
    on_record = pass_rates(*of_recorded_gpus(LINES, VERDICTS))
    counts = pass_rates(LINES, VERDICTS)
    assert {family: (int(passed), int(count)) for family, passed, count in rows} == {
        family: (on_record[family][0], count) for family, (_, count) in counts.items()
    }


def test_most_lines_of_mixtures_pass() -> None:
    passed, count = pass_rates(LINES, VERDICTS)["mixture"]
    assert passed / count >= 0.85


def test_a_line_gets_the_gpus_that_its_experts_need() -> None:
    sizes = {"tensor-model": "2", "pipeline-model": "4", "expert-model": "4"}
    words = tuple(word for name, size in sizes.items() for word in (f"--{name}-parallel-size", size))
    mixture = Line(0, "", "mixture", 8, ("--num-experts", "8", *words))
    assert mixture.num_gpus == 32
    assert replace(mixture, argv=(*mixture.argv, "--expert-tensor-parallel-size", "1")).num_gpus == 16
    assert replace(mixture, argv=words).num_gpus == 8


def settings_by_flag() -> dict[str, Setting]:
    return {flag: setting for setting in all_settings() for flag in (*setting.flags, *setting.off)}


def test_settings_say_whether_megatron_has_their_flag_and_another_default() -> None:
    """`megatron=` at their declarations."""
    by_flag = {name: flag for flag in FLAGS for name in flag.flags}
    for setting in (each for each in all_settings() if not each.former):
        theirs = next((by_flag[name] for name in (*setting.flags, *setting.off) if name in by_flag), None)
        assert (setting.megatron == OWN) == (theirs is None), setting.name
        if theirs and differs(theirs, setting) and not SAME_DEFAULTS.keys() & {*setting.flags, *setting.off}:
            assert setting.megatron or setting.off, f"{setting.name}: say that the default differs"


def differs(flag: ParserFlag, setting: Setting) -> bool:
    return default_of(flag) != setting.default


def default_of(flag: ParserFlag) -> object:
    """A flag's default as a value; the text of what is not a literal."""
    try:
        default = ast.literal_eval(flag.default)
    except (SyntaxError, ValueError):
        return flag.default
    return tuple(default) if isinstance(default, list) else default


def test_the_document_has_all_defaults_that_differ() -> None:
    ours = settings_by_flag()
    different = set()
    for flag in FLAGS:
        known = next((ours[name] for name in flag.flags if name in ours), None)
        if known is not None and differs(flag, known):
            different.add(next(name for name in flag.flags if name in ours))
    section = DOCUMENT.split("\n### Defaults that differ\n")[1].split("\n##")[0]
    stated = set(re.findall(r"^\| `(--[\w-]+)`", section, re.MULTILINE))
    assert stated == different - set(SAME_DEFAULTS)
    assert set(SAME_DEFAULTS) <= different, "no longer different"
