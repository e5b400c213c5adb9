"""The runs of a stability suite, and what its command refuses."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest

from megafp8.analysis import stability_runs
from megafp8.cli.stability import main, places, run_suite
from megafp8.config import flags
from megafp8.config.variants import EMULATED_FORM
from megafp8.errors import ConfigError, NumericsError
from megafp8.launch import process_pool, stability, study_execution
from megafp8.launch.built_in_sizes import SIZES
from megafp8.launch.stability import (
    CONTROLS,
    PAIRS,
    SWEEP,
    Suite,
    build_study,
    is_finished,
    part_runs,
    plan_controls,
    unique_runs,
    write_suite_file,
)
from megafp8.launch.study import expand
from megafp8.launch.study_execution import StudyProgress, build_jobs
from megafp8.recipes.known_bad import KNOWN_BAD

SCRIPT = Path("pretrain_gpt.py")
DATA = ("--mock-data", "--tokenizer-type", "ByteLevelTokenizer")


def suite_of(tmp_path: Path, *parts: str, **fields) -> Suite:
    fields = {"size": "tiny", "recipes": ("tensorwise",), "num_seeds": 3, "flags": DATA} | fields
    return Suite(folder=tmp_path / "suite", parts=parts, **fields)


def test_every_size_is_valid_and_its_sweep_has_the_rate_of_the_pairs(tmp_path: Path) -> None:
    for size in SIZES:
        suite = suite_of(tmp_path, SWEEP, CONTROLS, size=size, num_seeds=2)
        assert len(unique_runs(part_runs(build_study(suite)))) > 20 and 1 in SIZES[size].factors
        controls = plan_controls(suite, SCRIPT)
        assert len(controls.trunks) == 2 and len(controls.forks) == 2 * SIZES[size].fork_points * 7


def test_parts_share_their_runs(tmp_path: Path) -> None:
    parts = part_runs(build_study(suite_of(tmp_path, PAIRS, SWEEP)))
    of_part = {part: {each.run.id for each in parts if each.part == part} for part in (PAIRS, SWEEP)}
    assert len(of_part[PAIRS]) == 3 * 3 and len(of_part[SWEEP]) == 2 * 3 * len(SIZES["tiny"].factors)
    assert len(of_part[PAIRS] & of_part[SWEEP]) == 2 * 3
    assert len({each.run.folder for each in parts}) == len(unique_runs(parts))


def test_the_settings_of_a_part_are_those_of_its_flags_which_are_parsed_once(tmp_path: Path, monkeypatch) -> None:
    parsed, parse = [], flags.parse_with_problems

    def count(argv, *more):
        parsed.append(tuple(argv))
        return parse(argv, *more)

    monkeypatch.setattr(flags, "parse_with_problems", count)
    suite = suite_of(tmp_path, PAIRS, SWEEP, "controls", gpus=4)
    build_study(suite)
    assert len(parsed) == 1 + len(suite.parts)
    for settings in suite.part_settings.values():
        assert settings.config.training.micro_batch_size == 4 and settings.config == parse(settings.flags)[0].config


def test_controls_and_good_forms_differ_in_one_thing(tmp_path: Path) -> None:
    runs = plan_controls(suite_of(tmp_path, CONTROLS), SCRIPT).forks
    words = {run.name.partition("/")[0]: run.command[run.command.index(str(SCRIPT)) + 1 :] for run in runs}
    configs = {name: flags.parse_with_problems(argv)[0].config for name, argv in words.items()}
    for bad, (good, _) in KNOWN_BAD.items():
        own, other = vars(configs[bad].precision), vars(configs[f"{good}{EMULATED_FORM}"].precision)
        assert len({name for name in own if own[name] != other[name]}) == (2 if bad == "nvfp4-plain" else 1)
        assert own["transformer_impl"] == other["transformer_impl"] == "emulated"


def test_a_continuation_starts_from_the_checkpoint(tmp_path: Path) -> None:
    model = ("--model-preset", "tiny", "--seq-length", "64")
    suite = suite_of(tmp_path, "continuation", checkpoint="runs/base", checkpoint_flags=model)
    runs = part_runs(build_study(suite))
    assert {each.run.config.checkpoint.pretrained_checkpoint for each in runs} == {"runs/base"}
    assert Counter(each.choice["recipe"] for each in runs) == {"bf16": 3, "tensorwise": 3}


def test_the_suite_is_a_job_array(tmp_path: Path) -> None:
    study = build_study(suite_of(tmp_path, PAIRS, slurm={"time": "1:00:00"}))
    study = dataclasses.replace(study, slurm={**study.slurm, "gpus_per_node": "0", "cpus_per_node": "1"})
    (job,) = build_jobs(study, expand(study))
    assert len(job.runs) == 9


def test_the_file_of_the_suite_names_every_run(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, PAIRS)
    content = json.loads(write_suite_file(suite, part_runs(build_study(suite))).read_text())
    assert Counter(run["recipe"] for run in content["runs"]) == {"bf16": 3, "bf16-control": 3, "tensorwise": 3}


@pytest.mark.parametrize(("exit_status", "finished"), [(65, True), (70, False)])
def test_a_divergence_is_a_result(tmp_path: Path, exit_status: int, finished: bool) -> None:
    run = expand(build_study(suite_of(tmp_path, PAIRS)))[0]
    found = type("State", (), {"exit_status": exit_status})()
    assert is_finished(StudyProgress(run=run, state="failed", step=3, found=found)) == finished


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"recipes": ("bf16",)}, "in every suite"), ({"num_seeds": 1}, "at least 2"),
        ({"flags": (*DATA, "--seed", "3")}, "--seed: set by the suite; remove it, and give the number of seeds with"),
        ({"recipes": ("fp3",)}, "--recipes fp3: unknown; choose from tensorwise(?!.*--variant)"),
        ({"recipes": ("nvfp4-e5m2",)}, "--recipes nvfp4-e5m2: unknown"), ({"recipes": ()}, "--recipes names no recipe"),
        ({"flags": (*DATA, "--eval-iters", "0")}, "--eval-iters 0: verdicts are on the last validation"),
        ({"flags": (*DATA, "--planted-fault", "inflated-qk")}, "--planted-fault: .* benchmarks/planted_faults.py"),
        ({"flags": (*DATA, "--fp8-format", "e4m3")}, "--fp8-format: set by the suite; .* --recipes"),
        ({"flags": (*DATA, "--precision", "output_layer=tensorwise")}, "quantize, which would apply to bf16, too"),
        ({"flags": (*DATA, "--save", "x")}, "--save: set by the suite; .* --output-dir"),
        ({"flags": (*DATA, "--micro-batch-size", "auto")}, "auto: each run could find a different size"),
        ({"num_sweep_seeds": 1}, "--sweep-seeds 1: intervals"),
    ],
)  # fmt: skip
def test_wrong_suites_are_refused(tmp_path: Path, fields: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_study(suite_of(tmp_path, PAIRS, **fields))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--parts", "pears"], "choose from pairs"), (["--parts", "continuation"], "--checkpoint FOLDER"),
        (["--parts", "pairs", "--checkpoint", "x"], "name it in --parts"), (["--job", "time=1"], "is for --slurm"),
        (["--parallel", "0"], "at least 1"), (["--parts", ","], "names no part"),
        (["--recipes", ""], "--recipes names no recipe"),
        (["--parts", "sweep", "--seeds", "7"], "--seeds 7: has no effect without pairs or controls or continuation"),
        (["--parts", "pairs", "--sweep-seeds", "3"], "--sweep-seeds 3: has no effect without sweep"),
        (["--fault-seeds", "3"], "--fault-seeds 3: the suite plants no faults; use benchmarks/planted_faults.py"),
        (["--parts", "faults"], "--parts faults: the suite plants no faults; use benchmarks/planted_faults.py"),
        (["--seeds", "0"], "--seeds 0: intervals over seeds need at least 2"),
        (["--sweep-seeds", "0"], "--sweep-seeds 0: intervals over seeds need at least 2"),
        (["--parts", "continuation", "--checkpoint", "nowhere"], "--checkpoint nowhere: no such folder"),
        (["--parts", "continuation", "--checkpoint", "."], "--checkpoint .: has no complete checkpoint"),
        (["--parts", "pairs,controls", "--slurm"], "--slurm: controls forks runs that are done; leave it out"),
        (["--parts", "pairs", "--slurm"], "(--job sbatch.mem=64G); or use --job exclusive=true"),
        (["--parts", "pairs", "--slurm", "--job", "bogus=1"], "--job: unknown key 'bogus'; the keys are name, "),
        (["--slurm", "--job", "sbatch={mem:64G}"], "give its keys one by one, as in --job sbatch.KEY=VALUE"),
        (["--slurm", "--job", "time.x=1"], "--job time.x=1: time has no keys"),
        (["--slurm", "--job", "time"], "--job time: must be KEY=VALUE"),
    ],
)  # fmt: skip
def test_wrong_flags_are_refused(tmp_path: Path, capsys, words: list[str], text: str) -> None:
    assert main(["--output-dir", str(tmp_path), "--dry-run", *words]) == 64
    assert text in capsys.readouterr().err


def test_a_dry_run_lists_forks_of_controls(tmp_path: Path, capsys) -> None:
    assert main(["--output-dir", str(tmp_path), "--parts", "controls", "--seeds", "2", "--dry-run"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "0 runs, 0 to start; controls: 2 trunks of 135 steps and 42 forks of 60, 2,790 steps"
    assert len(lines) == 2 + 42 and lines[0].startswith("controls/trunk/seed1: ") and not list(tmp_path.iterdir())


def test_the_status_of_controls_alone(tmp_path: Path, capsys) -> None:
    assert main(["--output-dir", str(tmp_path), "--parts", "controls", "--seeds", "2", "--status"]) == 0
    text = "controls: 2 trunks of 135 steps and 42 forks of 60, 2,790 steps to do"
    assert capsys.readouterr().out.splitlines() == ["no whole runs", text]


@pytest.mark.parametrize(("of_runs", "of_controls", "expected"), [(0, 75, 75), (75, 0, 75), (64, 70, 64), (0, 0, 0)])
def test_controls_are_trained_after_the_whole_runs(
    tmp_path: Path, monkeypatch, of_runs: int, of_controls: int, expected: int
) -> None:
    done = []
    monkeypatch.setattr("megafp8.cli.stability.run_suite", lambda *_: done.append("runs") or of_runs)
    monkeypatch.setattr("megafp8.cli.training_pool.train_forks", lambda *_: done.append("forks") or of_controls)
    words = ["--output-dir", str(tmp_path), "--parts", "pairs,controls", "--seeds", "2", "--", *DATA]
    assert main(words) == expected and done == (["runs"] if of_runs == 75 else ["runs", "forks"])
    assert len(json.loads((tmp_path / "stability.json").read_text())["control_forks"]) == 42
    assert "controls: 42 of 42 forks have no result" in (tmp_path / "report" / "stability.json").read_text()


@pytest.mark.parametrize(
    ("gpus", "ranks", "parallel", "expected"),
    [("", 1, None, (1, [])), ("", 2, 3, (3, [])), ("0,1", 1, None, (2, ["0", "1"])), ("0,1", 1, 8, (2, ["0", "1"])),
     ("0,1", 2, None, (1, ["0", "1"])), ("0,1", 1, 1, (1, ["0"]))],
)  # fmt: skip
def test_controls_take_the_places_of_the_machine(monkeypatch, gpus: str, ranks: int, parallel, expected) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert places(ranks, parallel) == expected
    if gpus:
        with pytest.raises(ConfigError, match="--gpus 4: this machine has 2"):
            places(4, parallel)


def test_a_dry_run_lists_every_run(tmp_path: Path, capsys) -> None:
    assert main(["--output-dir", str(tmp_path), "--parts", "pairs", "--seeds", "2", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "6 runs, 6 to start" and lines[0].startswith("pairs-bf16-seed1: ")


def test_the_report_reads_the_names_that_the_suite_writes() -> None:
    assert stability.SUITE_FILE == stability_runs.SUITE_FILE
    assert process_pool.OUTPUT_FILE == stability_runs.OUTPUT_FILE


def test_forks_of_controls_fit_a_given_length(tmp_path: Path) -> None:
    runs = plan_controls(suite_of(tmp_path, CONTROLS, flags=(*DATA, "--train-iters", "64")), SCRIPT)
    assert (runs.length, runs.last_step) == (8, 42)
    with pytest.raises(ConfigError, match="controls: trunks keep the checkpoints of all forks; remove --ckpt-keep"):
        plan_controls(suite_of(tmp_path, CONTROLS, flags=(*DATA, "--ckpt-keep", "1")), SCRIPT)


def test_what_the_controls_set_is_refused_in_that_part_only(tmp_path: Path) -> None:
    words = ("--transformer-impl", "emulated")
    with pytest.raises(ConfigError, match=f"{words[0]}: set by the part controls; remove it, or leave the part out"):
        build_study(suite_of(tmp_path, "controls", flags=(*DATA, *words)))
    part_runs(build_study(suite_of(tmp_path, PAIRS, flags=(*DATA, *words))))


def rates_of(runs, part: str) -> set[tuple[float, float]]:
    return {(run.run.config.optimizer.lr, run.run.config.optimizer.min_lr) for run in runs if run.part == part}


def rate_of_controls(tmp_path: Path, flags: tuple[str, ...]) -> tuple[float, float]:
    optimizer = suite_of(tmp_path, CONTROLS, flags=flags).part_settings[CONTROLS].config.optimizer
    return optimizer.lr, optimizer.min_lr


def test_a_given_learning_rate_is_that_of_all_parts_and_its_minimum_follows(tmp_path: Path) -> None:
    parts, flags = (PAIRS, SWEEP, "controls"), (*DATA, "--lr", "1e-3")
    runs = part_runs(build_study(suite_of(tmp_path, *parts, flags=flags)))
    assert rates_of(runs, PAIRS) == {rate_of_controls(tmp_path, flags)} == {(1e-3, 1e-4)}
    assert sorted(lr for lr, _ in rates_of(runs, SWEEP)) == pytest.approx([1e-3 * n for n in SIZES["tiny"].factors])
    assert all(minimum == pytest.approx(lr / 10) for lr, minimum in rates_of(runs, SWEEP))
    runs = part_runs(build_study(suite_of(tmp_path, *parts, flags=(*DATA, "--min-lr", "1e-5"))))
    assert {minimum for part in (PAIRS, SWEEP) for _, minimum in rates_of(runs, part)} == {1e-5}
    assert rate_of_controls(tmp_path, (*DATA, "--min-lr", "1e-5")) == (SIZES["tiny"].lr, 1e-5)
    assert SIZES["tiny"].lr in dict(rates_of(runs, PAIRS))


def test_the_seeds_of_the_sweep_are_those_of_the_size_or_given(tmp_path: Path) -> None:
    for given, expected in ((None, SIZES["tiny"].sweep_seeds), (4, 4)):
        runs = part_runs(build_study(suite_of(tmp_path, SWEEP, num_sweep_seeds=given)))
        assert len({run.choice["seed"] for run in runs}) == expected


def test_job_fields_with_keys_reach_the_script(tmp_path: Path, capsys) -> None:
    words = ["--job", "gpus_per_node=0", "--job", "cpus_per_node=2", "--job", "sbatch.mem=64G"]
    assert main(["--output-dir", str(tmp_path), "--parts", "pairs", "--slurm", "--dry-run", *words]) == 0
    assert "#SBATCH --mem=64G" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_report_alone_reads_the_suite_and_changes_nothing(tmp_path: Path, capsys) -> None:
    suite = suite_of(tmp_path, PAIRS)
    path = write_suite_file(suite, part_runs(build_study(suite)))
    before = path.read_text()
    assert main(["--output-dir", str(suite.folder), "--report-only"]) == 0
    assert path.read_text() == before and "pairs: tensorwise seed3: not started" in capsys.readouterr().out


def test_a_report_alone_refuses_a_folder_without_a_suite_and_flags_that_it_ignores(tmp_path: Path, capsys) -> None:
    words = [
        "--output-dir",
        str(tmp_path / "no"),
        "--report-only",
        "--seeds",
        "3",
        "--recipes",
        "mxfp8",
        "--",
        "--bf16",
    ]
    assert main(words) == 64
    errors = capsys.readouterr().err
    assert "ignores --recipes, --seeds, flags after --: remove them" in errors and "has no stability.json" in errors
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("exit_status", "is_finished_afterwards", "expected"),
    [(64, False, 64), (0, True, 0), (0, False, 75), (75, True, 75)],
)
def test_the_status_is_that_of_the_first_run_that_failed(
    tmp_path: Path, monkeypatch, exit_status: int, is_finished_afterwards: bool, expected: int
) -> None:
    def run_here(*_, results: Collection[int]) -> int:
        assert NumericsError.exit_status in results
        return exit_status

    monkeypatch.setattr(study_execution, "run_here", run_here)
    monkeypatch.setattr(stability, "is_finished", lambda _: is_finished_afterwards)
    runs = expand(build_study(suite_of(tmp_path, PAIRS)))
    assert run_suite(runs, runs, None) == expected
