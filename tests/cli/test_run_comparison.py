"""The command line of tools/run_comparison.py: real concurrent runs of a few steps in two recipes, and the report."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from forked_python import forked_python
from small_run import COMMON, STYLES

from megafp8.analysis.runs import load_run
from megafp8.cli import built_in_data, run_comparison, training_pool
from megafp8.config import flags, iterations
from megafp8.config.lr_schedule import schedule_samples
from megafp8.config.schema import DataConfig
from megafp8.errors import INTERNAL, ConfigError, DataError
from megafp8.launch.process_pool import PooledRun
from megafp8.optimizer.schedules import preview_schedule
from megafp8.resilience.run_state import RUN_STATE_FILE, RunState
from megafp8.utils.process import current_process

TOOL = Path(__file__).resolve().parents[2] / "tools" / "run_comparison.py"
FLAGS = [
    *COMMON.split(),
    *STYLES["llama"].split(),
    "--num-layers",
    "3",
    "--train-iters",
    "4",
    "--no-save-optim",
    "--seed",
    "7",
]


def run_tool(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The command and its runs, in processes that fork."""
    with tempfile.TemporaryDirectory(prefix="python_") as name, forked_python(Path(name)) as environment:
        command = ["python", str(TOOL), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    """Two concurrent runs in two recipes, by the command."""
    folder = tmp_path_factory.mktemp("comparison")
    words = ["--output-dir", str(folder), "--recipes", "bf16,mxfp8", "--parallel", "2", "--", *FLAGS]
    return folder, run_tool(words)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return run_comparison


@pytest.fixture
def compare(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the tool's main in this process, which saves its imports. Returns exit status, standard output and error."""

    def run(folder: Path, *words: str, flags: Sequence[str] = FLAGS) -> tuple[int, str, str]:
        status = tool.main(["--output-dir", str(folder), *words, "--", *flags])
        return status, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_runs_are_paired_in_the_report(finished: tuple[Path, subprocess.CompletedProcess]) -> None:
    folder, ended = finished
    assert ended.returncode == 0, ended.stderr
    runs = [load_run(folder / name / "seed7") for name in ("bf16", "mxfp8")]
    for run in runs:
        assert len(run.steps) == 4 and run.info.config["training"]["seed"] == 7
        assert (folder / run.folder.parent.name / "seed7" / "output.log").stat().st_size > 100
    # The same weights and the same samples: before any update the losses differ only by rounding.
    assert runs[0].steps[0].loss == pytest.approx(runs[1].steps[0].loss, rel=1e-2)
    assert runs[0].steps[0].loss != runs[1].steps[0].loss
    content = json.loads((folder / "report" / "comparison.json").read_text())
    assert [(row["name"], row["verdict"]) for row in content["recipes"]] == [("bf16", ""), ("mxfp8", "not decided")]
    assert "fp8 e4m3 mxfp8, emulated, on bf16" in ended.stdout
    assert 'data-recipe="mxfp8"' in (folder / "report" / "report.html").read_text()


@pytest.mark.slow
def test_the_schedule_preview_equals_the_recorded_run(finished) -> None:
    run = load_run(finished[0] / "bf16" / "seed7")
    config = flags.parse(FLAGS).config
    samples, batches = schedule_samples(config, 1), iterations.batch_schedule(config, 1)
    previewed = preview_schedule(config.optimizer, samples, batches, [1, 2, 3, 4])
    assert [step.learning_rate for step in previewed] == pytest.approx([record.learning_rate for record in run.steps])


@pytest.mark.slow
def test_finished_runs_are_reused_and_other_settings_are_refused(finished, compare) -> None:
    folder, _ = finished
    before = (folder / "bf16" / "seed7" / RUN_STATE_FILE).read_bytes()
    shared = ("--recipes", "bf16,mxfp8")
    status, said, told = compare(folder, *shared, "--bound", "20", flags=[*FLAGS, "--log-interval", "3"])
    assert status == 0 and "2 of 2 runs are done already" in told
    assert "bound 20%" in said
    status, _, told = compare(folder, *shared, flags=[*FLAGS, "--lr", "5e-4"])
    assert status == 64 and "holds a run with other settings (optimizer.lr: 0.001 -> 0.0005)" in told
    assert (folder / "bf16" / "seed7" / RUN_STATE_FILE).read_bytes() == before


def test_wrong_flags_of_the_tool_are_status_64(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--size", "huge"], "invalid choice: 'huge'"),
        (["--output-dir", "a", "--seeds", "x"], "'x' is not an integer"),
    ):
        with pytest.raises(SystemExit) as ended:
            tool.main(words)
        assert ended.value.code == 64 and said in capsys.readouterr().err


def test_wrong_flags_are_reported_before_any_start(compare, tmp_path: Path) -> None:
    status, _, told = compare(tmp_path / "out", "--recipes", "bf16,mxfp8,fp6", "--seeds", "2")
    assert status == 64 and "recipe fp6: unknown; choose from bf16" in told
    narrow = [*FLAGS, "--hidden-size", "48", "--num-attention-heads", "4"]
    status, _, told = compare(tmp_path / "out", "--recipes", "bf16,mxfp8", flags=narrow)
    assert status == 64 and "mxfp8: " in told and "bf16: " not in told
    for extra in ("--precision *.linear_fc2=blockwise", "--first-last-layers-bf16", "--fp8-schedule bf16:2,fp8"):
        status, _, told = compare(tmp_path / "out", "--recipes", "bf16", flags=[*FLAGS, *extra.split()])
        assert status == 64 and "would also apply to the baseline" in told, extra
    assert compare(tmp_path / "out", "--recipes", "bf16", flags=[*FLAGS, "--micro-batch-size", "auto"])[0] == 64
    with pytest.raises(SystemExit) as ended:
        compare(tmp_path / "out", "--recipes", "bf16", "--bound", "nan")
    assert ended.value.code == 64
    status, _, told = compare(tmp_path / "out", "--recipes", "bf16", "--variant", "x=--micro-batch-size auto")
    assert status == 64 and "--variant x: --micro-batch-size auto" in told
    assert not (tmp_path / "out").exists()


def test_a_failed_baseline_is_an_error(tool: ModuleType, tmp_path: Path) -> None:
    runs = [PooledRun(name=name, command=(), folder=tmp_path / name / "seed1") for name in ("bf16", "mxfp8")]
    with pytest.raises(DataError, match="nothing to compare: bf16/seed1 is not done .*: it never began; mxfp8/seed1"):
        tool.report(runs, tool.build_parser().parse_args(["--output-dir", str(tmp_path)]))


def test_a_run_that_failed_decides_the_status_also_without_a_report(
    tool: ModuleType, compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "train", lambda *_: INTERNAL)
    status, _, told = compare(tmp_path, "--recipes", "bf16,tensorwise")
    assert status == 70 and "bf16/seed7 is not done and not in the figures: it never began" in told


def test_a_dry_run_shows_every_command(compare, tmp_path: Path) -> None:
    edges = "edges=--fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16"
    words = ("--recipes", "bf16,bf16-control", "--variant", edges, "--seeds", "2", "--nproc-per-node", "2")
    status, said, told = compare(tmp_path, *words, "--dry-run", "--verbose")
    assert status == 0 and told == f"6 runs of 4 steps, 1 at a time, in {tmp_path}\n"
    lines = dict(line.split(": ", 1) for line in said.splitlines() if "/seed" in line)
    assert list(lines) == [f"{name}/seed{seed}" for seed in (7, 8) for name in ("bf16", "bf16-control", "edges")]
    assert "torch.distributed.run --standalone --nproc-per-node 2" in lines["bf16/seed7"]
    assert "--seed 8" in lines["edges/seed8"] and "--first-last-layers-bf16" in lines["edges/seed8"]
    assert list(tmp_path.iterdir()) == []


FORKED = [*FLAGS, "--train-iters", "8"]
FORKED.remove("--no-save-optim")


@pytest.mark.slow
def test_forks_of_two_trunks_are_compared(tmp_path: Path) -> None:
    """Real runs: an interrupted fork restarts, what is done is kept, and weights of forks are not."""
    words = ["--output-dir", str(tmp_path), "--recipes", "bf16,tensorwise", "--seeds", "2", "--parallel", "2"]
    words += ["--forks", "4", "--fork-length", "4", "--", *FORKED]
    partial = tmp_path / "forks/tensorwise/seed7-step4"
    partial.mkdir(parents=True)
    (partial / "records.jsonl").write_text("interrupted")
    for _ in range(2):
        ended = run_tool(words)
        assert ended.returncode == 0, ended.stderr
        assert "bf16-control  noise floor" in ended.stdout
    assert "6 of 6 forks are done already" in ended.stderr
    assert not list(tmp_path.glob("forks/**/iter_*")) and list(tmp_path.glob("trunks/seed7/iter_0000004"))
    base, trunk = (load_run(tmp_path / name) for name in ("forks/bf16/seed7-step4", "trunks/seed8"))
    assert [step.step for step in base.steps] == [5, 6, 7, 8] and len(trunk.steps) == 4
    quantized = load_run(tmp_path / "forks/tensorwise/seed7-step4")
    assert [record.split for record in quantized.evals if record.step == 8][:2] == ["valid", "valid-high-precision"]
    assert quantized.series("learning_rate").tolist() == base.series("learning_rate").tolist()
    assert "tensorwise" in (tmp_path / "report/forks.html").read_text()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--forks", "4", "--fork-length", "5"), "--fork-length 5 must be a multiple of 4"),
        (("--forks", "3", "--fork-length", "8"), "step 3 must be a multiple of 2"),
        (("--forks", "2,2", "--fork-length", "4"), "give different steps"),
        (("--forks", "4", "--fork-length", "8"), "end after --train-iters 8"),
        (("--forks", "2", "--fork-length", "4", "--recipes", "mxfp8,bf16"), "the first of --recipes must be bf16"),
        (("--forks", "2", "--fork-length", "4", "--csv"), "--csv has no effect with --forks"),
        (("--forks", "2", "--runs-per-gpu", "2"), "this machine has no GPU"),
        (("--forks", "2", "--controls", "--variant", "mxfp8-floor=--bf16"), "mxfp8-floor: named twice"),
    ],
)
def test_forks_that_do_not_fit_are_refused(compare, tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    status, _, err = compare(tmp_path, *words, flags=[*FORKED, "--ffn-hidden-size", "96"])
    assert status == ConfigError.exit_status and problem in err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--ckpt-keep 2", "remove --ckpt-keep"),
        ("--eval-iters 0", "give --eval-iters 1 or more"),
        ("--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1", "--weight-decay that grows"),
        ("--no-save-optim", "remove --no-save-optim"),
    ],
)
def test_runs_that_cannot_fork_are_refused(compare, tmp_path: Path, flags: str, problem: str) -> None:
    status, _, err = compare(tmp_path, "--forks", "4", "--fork-length", "4", flags=[*FORKED, *flags.split()])
    assert status == ConfigError.exit_status and problem in err


@pytest.mark.parametrize("size", ["laptop", "gpu"])
def test_forks_fit_the_built_in_sizes(compare, tmp_path: Path, size: str) -> None:
    status, _, err = compare(tmp_path, "--forks", "--seeds", "4", "--size", size, "--dry-run", flags=())
    assert status == 0 and "4 trunks" in err and "36 forks" in err, err


def recorded(folder: Path, state: str, last_step: int) -> None:
    folder.mkdir(parents=True)
    now = time.time()
    found = RunState(
        state=state, step=1, last_step=last_step, world_size=1, process=current_process(), started_at=now,
        updated_at=now,
    )  # fmt: skip
    (folder / RUN_STATE_FILE).write_text(json.dumps(found.to_plain()))


def test_what_other_commands_left_is_not_mixed_in(compare, tmp_path: Path) -> None:
    words = ("--forks", "4", "--fork-length", "4", "--recipes", "bf16")
    recorded(tmp_path / "a/forks/bf16/seed7-step2", "done", 10)
    status, _, err = compare(tmp_path / "a", *words, flags=FORKED)
    assert status == ConfigError.exit_status and "has forks of 8 steps" in err
    recorded(tmp_path / "b/trunks/seed7", "done", 4)
    status, _, err = compare(tmp_path / "b", *words, flags=FORKED)
    assert status == ConfigError.exit_status and "is done and has no checkpoint of step 4" in err
    recorded(tmp_path / "c/forks/bf16/seed7-step4", "running", 8)
    status, _, err = compare(tmp_path / "c", *words, flags=FORKED)
    assert status == ConfigError.exit_status and "is running" in err


def test_a_trunk_that_fails_leaves_the_others_forks(compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[list[str]]()

    def train(runs: Sequence[PooledRun], *rest: object, **others: object) -> int:
        started.append([run.name for run in runs])
        if len(started) == 1:
            recorded(tmp_path / "trunks/seed8", "done", 4)
            (tmp_path / "trunks/seed8/iter_0000004").mkdir()
        return 70

    monkeypatch.setattr(training_pool, "train", train)
    status, _, err = compare(tmp_path, "--forks", "4", "--fork-length", "4", "--seeds", "2", "--recipes", "bf16",
                             flags=FORKED)  # fmt: skip
    assert started == [["trunk/seed7", "trunk/seed8"], ["bf16/seed8-step4", "bf16-control/seed8-step4"]]
    assert status == 70 and "has no finished fork" in err


def test_runs_that_lack_memory_beside_others_name_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "import sys; sys.exit('CUDA out of memory')"
    runs = [
        PooledRun(name=name, command=(sys.executable, "-c", program), folder=tmp_path / name) for name in ("a", "b")
    ]
    assert training_pool.train(runs, 2, ["0", "0"], 4) == INTERNAL
    assert "2 of them lacked memory: with fewer --runs-per-gpu the same command" in capsys.readouterr().err
    assert training_pool.train(runs, 2, ["0", "1"], 4) == INTERNAL
    assert "lacked memory" not in capsys.readouterr().err


def test_controls_are_forks_with_their_good_forms(compare, tmp_path: Path) -> None:
    status, _, err = compare(tmp_path, "--controls", flags=FORKED)
    assert status == ConfigError.exit_status and "--controls is for --forks" in err
    words = ("--forks", "4", "--fork-length", "4", "--controls", "--dry-run", "--verbose", "--recipes", "bf16")
    status, out, err = compare(tmp_path, *words, flags=[*FORKED, "--ffn-hidden-size", "96"])
    assert status == 0 and "1 trunks of 4 steps and 9 forks of 4" in err, err
    names = [line.partition("/")[0] for line in out.splitlines()[1:]]
    assert names == [
        "bf16", "bf16-control", "mxfp8-emulated", "tensorwise-emulated", "nvfp4-emulated", "mxfp8-floor",
        "e5m2-forward", "nvfp4-plain", "tensorwise-margin-3",
    ]  # fmt: skip


def test_without_flags_a_built_in_size_is_trained_on_built_in_data(tool: ModuleType, tmp_path: Path, capsys) -> None:
    words = ["--recipes", "bf16,bf16-control,nvfp4", "--seeds", "3", "--parallel", "2", "--output", str(tmp_path)]
    flags = ["--", "--lr", "1e-3", "--train-iters", "50"]
    assert tool.main([*words, "--dry-run", *flags]) == 0
    said, told = capsys.readouterr()
    assert told.startswith("9 runs of 50 steps, 2 at a time: about ") and told.endswith(f"MB in {tmp_path}\n")
    assert said.splitlines() == [
        "baseline: bf16", "compared with it: bf16-control, nvfp4", "seeds: 1234, 1235, 1236",
        f"data: bytes of Python's standard library, in {tmp_path}/data", f"report: {tmp_path}/report",
        "nothing was written; --verbose shows the commands",
    ]  # fmt: skip
    assert not list(tmp_path.iterdir())
    assert tool.main([*words, "--dry-run", "--verbose", *flags]) == 0
    said = capsys.readouterr().out
    lines = dict(line.split(": ", 1) for line in said.splitlines() if "/seed" in line)
    assert len(lines) == 9 and "--fp4-recipe nvfp4" in lines["nvfp4/seed1234"]
    for part in ("--hidden-size 128", "--min-lr 0.0001", "bytes_text_document", "--lr 1e-3", "--train-iters 50"):
        assert part in lines["bf16/seed1236"], part
    assert "--train-iters 300" not in said


def test_a_warmup_in_steps_replaces_the_fraction_of_the_size(tool: ModuleType, tmp_path: Path, capsys) -> None:
    words = ["--recipes", "bf16", "--output", str(tmp_path), "--dry-run", "--verbose", "--", "--lr-warmup-iters", "5"]
    assert tool.main(words) == 0
    printed = capsys.readouterr().out
    assert "--lr-warmup-iters 5" in printed and "--lr-warmup-fraction" not in printed


def test_built_in_data_are_written_once_and_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = flags.parse_with_problems(built_in_data.data_flags(tmp_path, DataConfig()))[0].config.data
    for told in (f"writing 1 MB of Python's standard library to {tmp_path}/data\n", ""):
        built_in_data.prepare_data(data, tmp_path, 1_000_000)
        assert capsys.readouterr() == ("", told)
    assert (tmp_path / "data" / "bytes_text_document.bin").is_file()
    assert built_in_data.data_flags(tmp_path, data) == ()


def test_flags_with_a_model_are_complete_unless_a_size_is_named(tool: ModuleType, tmp_path: Path, capsys) -> None:
    words = ["--recipes", "bf16,nvfp4", "--output", str(tmp_path), "--dry-run"]
    assert tool.main([*words, "--", "--num-layers", "3"]) == 64
    assert "--hidden-size, --num-attention-heads: missing" in capsys.readouterr().err and not list(tmp_path.iterdir())
    words.append("--verbose")
    assert tool.main([*words, "--size", "laptop", "--nproc-per-node", "2", "--", "--num-layers", "3"]) == 0
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("bf16/"))
    assert "--num-layers 3" in command and "--num-layers 2" not in command and "--micro-batch-size 8" in command
    assert tool.main(["--recipes", "bf16,fp6", "--output", str(tmp_path / "other")]) == 64
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_without_all_its_state_is_not_resumed_from(tool: ModuleType, tmp_path: Path, capsys) -> None:
    for name in ("iter_0000003", "iter_0000004.unfinished", "tensorboard"):
        (tmp_path / name).mkdir()
    for name in ("latest_checkpointed_iteration.txt", "records.jsonl"):
        (tmp_path / name).touch()
    tool.discard_partial_checkpoints(PooledRun(name="bf16/seed7", command=(), folder=tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.jsonl", "tensorboard"]
    assert capsys.readouterr().err.startswith("bf16/seed7 restarts")


def test_runs_get_gpus_of_their_own_or_a_share_of_the_cores(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    share = tool.share_devices
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert share(2, 2, 5) == (["0", "1", "2", "3"], [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,GPU-ab")
    assert share(3, 1, 3)[0] == ["5", "7", "GPU-ab"]
    with pytest.raises(ConfigError, match="takes 4 GPUs; there are 3"):
        share(2, 2, 3)
    assert share(4, 1, 3, runs_per_gpu=2)[0] == ["5", "7", "GPU-ab", "5"]
    with pytest.raises(ConfigError, match="for runs of one rank"):
        share(2, 2, 3, runs_per_gpu=2)
    gpus, flags = share(2, 1, 0)
    assert not gpus and flags[0] == "--num-threads" and int(flags[1]) >= 1
