"""Phases of data: the file, the samples at which they start, and one clear error for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.config import flags, rules
from megafp8.config.data_phases import first_samples, parse_phases, read_phases, schedule_marks
from megafp8.config.schema import RunConfig
from megafp8.errors import ConfigError

RUN = (
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 100 --lr 1e-3 --lr-warmup-iters 10 "
    "--lr-decay-style WSD --lr-wsd-decay-iters 20 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size 255"
)
WEB, ANNEAL = "web 0% 0.7 web 0.3 code", "anneal 90% 0.2 web 0.8 math"
FILE = """
- name: web
  data_path: [0.7, web, 0.3, code]
- name: anneal
  start: 90%
  data_path: 0.2 web 0.8 math
"""


def config_of(*phases: str, words: str = RUN) -> RunConfig:
    return flags.parse([*words.split(), "--data-phases", *phases]).config


def two(start: str, words: str = RUN) -> RunConfig:
    return config_of("web 0% a", f"end '{start}' b", words=words)


def test_a_file_becomes_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "phases.yaml"
    path.write_text(FILE)
    config = config_of(str(path))
    assert config.data.data_phases == (WEB, ANNEAL)
    assert flags.parse(flags.to_argv(config)).config == config
    of_file = tmp_path / "run.yaml"
    of_file.write_text(f"data_phases: {path}\n")
    assert flags.parse([str(of_file)]).config.data.data_phases == (WEB, ANNEAL)
    path.write_text("- data_path: 1 a 2 b\n- {start: 5 samples, data_path: ['a b']}\n")
    phases = parse_phases(config_of(*read_phases(str(path))).data)
    assert [phase.words for phase in phases] == [("1", "a", "2", "b"), ("a b",)]
    assert [(phase.name, phase.start) for phase in phases] == [("phase1", "0%"), ("phase2", "5 samples")]


def test_the_example_is_valid() -> None:
    path = Path(__file__).resolve().parents[3] / "examples" / "data_phases.yaml"
    phases = parse_phases(config_of(str(path)).data)
    assert [(phase.name, phase.start) for phase in phases] == [
        ("web", "0%"),
        ("code", "900B tokens"),
        ("anneal", "90%"),
    ]


@pytest.mark.parametrize(
    ("start", "first"),
    [("90%", 720), ("33.3%", 266), ("100 samples", 100), ("1.5K samples", 1500), ("6431 tokens", 200), ("9 steps", 72)],
)
def test_starts_are_exact(start: str, first: int) -> None:
    words = RUN.replace("--train-iters 100", "--train-iters 400") if first > 800 else RUN
    assert first_samples(two(start, words), 1) == (0, first)


def test_starts_follow_a_ramp_up() -> None:
    """Sizes 4 and 8 from samples 0 and 20: five steps of 4, then steps of 8."""
    ramp = "--train-samples 100 --rampup-batch-size 4 4 20 --lr-warmup-samples 10 --lr-wsd-decay-samples 20"
    words = RUN.replace("--train-iters 100", ramp).replace("--lr-warmup-iters 10", "")
    words = words.replace("--lr-wsd-decay-iters 20", "")
    assert first_samples(two("6 steps", words), 1) == (0, 28)
    assert first_samples(two("50%", words), 1) == (0, 50)


def test_phases_of_the_learning_rate_are_named_with_them() -> None:
    assert schedule_marks(two("80%"), 1) == {"warm-up ends": 11.0, "decay begins": 81.0, "data: end": 81.0}
    assert schedule_marks(two("101 samples"), 1)["data: end"] == 1 + 101 / 8


@pytest.mark.parametrize(
    ("phases", "problem"),
    [
        (["web 0% a", "b 500samples b", "c 50% c"], "--data-phases b: it ends before it begins: it starts at sample "
         "500, and c (start 50%) at sample 400"),
        (["web 0% a", "b 2Mtokens b"], "--data-phases b: start 2Mtokens is sample 62,500, beyond the run's 800"),
        (["web 0% a", "b 300 b"], "--data-phases b: start '300' is no number with its unit"),
        (["web 5% a"], "the first phase starts the run"),
        (["web 0% 0 a 0 b"], "--data-phases web: 0 a 0 b: weights must be above 0"),
        (["web 0% a b"], "--data-phases web: a b: give each shard its weight"),
        (["web 0% 1 a 1 a"], "a is given twice: add its weights"),
        (["web 0%"], "--data-phases web: no shards"),
        (["web 0% a", "web 50% b"], "two phases have the name web"),
        (["a.json"], "--data-phases 'a.json': give a YAML file"),
        (["w/b 0% a"], "the name 'w/b'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_problem(phases: list[str], problem: str) -> None:
    (found,) = rules.setting_problems(config_of(*phases), 1)
    assert problem in found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- data_pth: a", ":1: phase 1: unknown key 'data_pth'; did you mean data_path?"),
        ("- data_path: a\n- data_path: b", ":2: phase 2: start is missing: write 90%"),
        ("- data_path: a\n  data_path: b", ":2: phase 1: data_path is given twice"),
        ("- data_path: {a: 1}", ":1: phase 1: data_path must be text"),
        ("- name: [a]", ":1: phase 1: name must be text"),
        ("- web", ":1: phase 1 must have the keys"),
        ("data_path: a", ": must be a list of phases"),
        ("", ": must be a list of phases"),
        ("- [", ":1: not YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "phases.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        config_of(str(path))
    assert f"{path}{problem}" in str(raised.value)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--mock-data", "--data-phases and --mock-data are given"),
        ("--train-data-path t", "--data-phases and --train-data-path are given"),
        ("--split 9,1", "--split 9,1 with --data-phases divides --data-path and the phases: give --data-path"),
        ("--data-path a --valid-data-path v", "--valid-data-path needs --train-data-path"),
    ],
)
def test_other_sources_of_data(words: str, problem: str) -> None:
    (found,) = rules.setting_problems(config_of(WEB, words=f"{RUN} {words}"), 1)
    assert problem in found


@pytest.mark.parametrize("words", ["", "--valid-data-path v", "--data-path a --split 9,1"])
def test_data_that_is_held_out(words: str) -> None:
    assert rules.setting_problems(config_of(WEB, words=f"{RUN} {words}"), 1) == []


def test_the_flag_of_megatron_names_it() -> None:
    _, problems = flags.parse_with_problems(["--phase-transition-iterations", "10,20"])
    assert len(problems) == 1 and "--data-phases FILE" in problems[0]
