"""`--micro-batch-size auto`: what a trial measures, how a size is chosen, stored and reused, and complete runs."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_runs import prepare, run_forked
from ranks import run_ranks
from small_run import COMMON, FP8, STYLES

from megafp8.analysis.runs import load_run
from megafp8.config import flags
from megafp8.config.layer_backends import EMULATED
from megafp8.config.schema import RunConfig
from megafp8.device.platform import Platform, detect_platform, peak_resident_bytes, resident_bytes
from megafp8.errors import PREEMPTED, CheckpointError, ConfigError, DataError
from megafp8.resilience.watchdog import Watchdog
from megafp8.training.micro_batch_search import search
from megafp8.training.micro_batch_search.messages import (
    MEMORY_EXCEEDED_STATUS,
    TrialResult,
    TrialSetup,
)
from megafp8.training.micro_batch_search.search import CHOICE_FILE, choose_micro_batch, introduction, read_choice
from megafp8.training.micro_batch_search.trial import (
    TIMED_S,
    TrialRun,
    first_sentence,
    limit_memory,
    step_kinds,
    trial_config,
)

MIB, GIB = 2**20, 2**30
CPU = Platform("cpu", torch.device("cpu"), "a CPU", "gloo")


def auto_config(extra: str = "") -> RunConfig:
    return flags.parse(f"{COMMON} {STYLES['llama']} --micro-batch-size auto {extra}".split()).config


# ---- one trial ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "extra"),
    [
        (1, f"--bf16 {FP8} --fp8-log-interval 50 --fp8-schedule bf16:2,fp8"),
        (1, f"--bf16 {FP8} --fp8-log-interval 2 --fp8-schedule bf16:9,fp8"),
        (1, "--fp16"),
        (2, "--bf16 --pipeline-model-parallel-size 2 --global-batch-size 16"),
        (2, "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    ],
)
def test_a_trial_measures_training_steps(world_size: int, extra: str) -> None:
    """For growing and shrinking sizes in one process, with updates."""
    setup = TrialSetup(config=auto_config(extra), implementation="emulated", limit_bytes=1 << 50)

    def measure() -> tuple[list[TrialResult], bool]:
        run = TrialRun(setup, 2)
        before = [parameter.detach().clone() for parameter in run.run.training_state.chunks[0].parameters()]
        answers = [run.measure(size) for size in (2, 4, 1)]
        after = run.run.training_state.chunks[0].parameters()
        return answers, all(torch.equal(old, new) for old, new in zip(before, after, strict=True))

    for answers, is_unchanged in run_ranks(world_size, measure):
        assert all(answer.ms_per_sample is not None for answer in answers)
        assert all(answer.ms_per_sample > 0 and answer.peak_bytes > 50 * MIB for answer in answers)
        assert not is_unchanged


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("second", [4.0, 0.1, 0.001])
@pytest.mark.parametrize("size", [1, 2, 16])
def test_long_steps_are_extrapolated_from_short_ones(stages: int, second: float, size: int) -> None:
    """A step takes about 0.5 s plus 0.25 s per microbatch, of 32. Two microbatch counts determine both parts."""
    counts: list[int] = []

    def step(_: int, num_microbatches: int, number: int, has_statistics: bool = False) -> float:
        counts.append(num_microbatches)
        return second * (0.5 + 0.25 * num_microbatches)

    parallel = SimpleNamespace(
        pipeline_model_parallel_size=stages, microbatch_group_size_per_virtual_pipeline_stage=None
    )
    run = SimpleNamespace(rank_position=SimpleNamespace(data_size=1), config=SimpleNamespace(parallel=parallel))
    setup = TrialSetup(config=auto_config("--global-batch-size 32"), implementation="emulated", limit_bytes=1 << 50)
    trial = SimpleNamespace(run=run, setup=setup, platform=CPU, step=step, slowest_s=float, kinds=[1])
    trial.timed_counts = partial(TrialRun.timed_counts, trial)
    answer, num_microbatches = TrialRun.measure(trial, size), 32 // size
    assert answer.ms_per_sample is not None
    assert answer.ms_per_sample == pytest.approx(1000 * second * (0.5 + 0.25 * num_microbatches) / 32)
    assert all(count % stages == 0 and count <= num_microbatches for count in counts)
    assert max(counts) in (num_microbatches, 2 * stages) or second * (0.5 + 0.25 * max(counts)) < 1.5 * TIMED_S


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("", [1]), ("--fp8-schedule bf16:2,fp8", [3, 1]), ("--fp8-schedule fp8:2,bf16:1000,fp8", [3, 1])],
)
def test_every_precision_of_a_schedule_is_tried(schedule: str, expected: list[int]) -> None:
    """The precision of most of a thousand steps comes first, and is timed."""
    config = auto_config(f"--bf16 {FP8} {schedule} --train-iters 1000")
    assert step_kinds(config, 1) == expected
    seen: list[int] = []

    def step(_: int, num_microbatches: int, number: int, has_statistics: bool = False) -> float:
        seen.append(number)
        return 1.0

    parallel = SimpleNamespace(pipeline_model_parallel_size=1, microbatch_group_size_per_virtual_pipeline_stage=None)
    run = SimpleNamespace(rank_position=SimpleNamespace(data_size=1), config=SimpleNamespace(parallel=parallel))
    setup = TrialSetup(config=config, implementation="emulated", limit_bytes=1 << 50)
    trial = SimpleNamespace(run=run, setup=setup, platform=CPU, step=step, slowest_s=float, kinds=expected)
    trial.timed_counts = partial(TrialRun.timed_counts, trial)
    TrialRun.measure(trial, 1)
    assert set(seen) == set(expected) and seen[-1] == expected[0]


def test_a_peak_above_the_limit_does_not_fit() -> None:
    """Also one that is too short for the process to be observed above the limit."""
    parallel = SimpleNamespace(pipeline_model_parallel_size=1, microbatch_group_size_per_virtual_pipeline_stage=None)
    run = SimpleNamespace(rank_position=SimpleNamespace(data_size=1), config=SimpleNamespace(parallel=parallel))
    platform = SimpleNamespace(reset_peak_memory=lambda: None, peak_memory_bytes=lambda: 5 * MIB)

    def answer(limit_bytes: int) -> TrialResult:
        setup = TrialSetup(
            config=auto_config(), implementation="emulated", limit_bytes=limit_bytes, outside_bytes=3 * MIB
        )
        trial = SimpleNamespace(run=run, setup=setup, platform=platform, step=lambda *_, **__: 1.0, kinds=[1])
        trial.slowest_s, trial.timed_counts = float, partial(TrialRun.timed_counts, trial)
        return TrialRun.measure(trial, 4)

    assert answer(7 * MIB) == TrialResult(too_large="took 0.01 GiB")
    assert answer(8 * MIB) == TrialResult(8 * MIB, pytest.approx(1000 / auto_config().training.global_batch_size))


def test_trials_use_a_constant_loss_scale() -> None:
    config = trial_config(auto_config("--fp16"), 2)
    assert (config.optimizer.loss_scale, config.training.micro_batch_size) == (1.0, 2)
    assert trial_config(auto_config("--bf16"), 2).optimizer.loss_scale is None


@pytest.mark.parametrize(("limit_bytes", "fraction"), [(20, 0.2), (-10, 0.0), (200, 1.0)])
def test_the_memory_limit_of_a_gpu(monkeypatch: pytest.MonkeyPatch, limit_bytes: int, fraction: float) -> None:
    """It is negative if a process without tensors is above it."""
    limits: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, _: limits.append(part))
    limit_memory(SimpleNamespace(kind="cuda", device=None, total_memory_bytes=lambda: 100), limit_bytes)
    assert limits == [fraction]


def test_a_process_above_the_memory_limit_ends() -> None:
    def grow(by_bytes: int) -> None:
        limit_memory(CPU, resident_bytes() + 200 * MIB)
        held = torch.ones(by_bytes // 4)
        time.sleep(1.0)
        raise SystemExit(int(held[0]) - 1)

    def status(by_bytes: int) -> Any:
        process = multiprocessing.get_context("fork").Process(target=grow, args=(by_bytes,))
        process.start()
        process.join()
        return process.exitcode

    assert (status(400 * MIB), status(100 * MIB)) == (MEMORY_EXCEEDED_STATUS, 0)


def test_the_memory_peak_can_be_reset() -> None:
    much = torch.ones(100 * MIB)
    high = peak_resident_bytes()
    del much
    assert peak_resident_bytes() > high - 50 * MIB, "though it is given back"
    CPU.reset_peak_memory()
    assert peak_resident_bytes() < high - 300 * MIB
    assert CPU.peak_memory_bytes() == peak_resident_bytes()


def test_the_first_sentence_of_an_error() -> None:
    assert first_sentence("OutOfMemoryError: CUDA out of memory. Tried\nmore") == "OutOfMemoryError: CUDA out of memory"


# ---- the choice ---------------------------------------------------------------------------------------------------


class FakeProcess:
    """Answers like a machine with room for two sequences, where one takes `one_ms` and two take 5 ms."""

    def __init__(self, one_ms: float):
        self.one_ms, self.requested = one_ms, []

    def measure(self, size: int) -> TrialResult:
        self.requested.append(size)
        return TrialResult(too_large="no room") if size > 2 else TrialResult(size * GIB, {1: self.one_ms, 2: 5.0}[size])

    def close(self) -> None:
        self.requested.append(0)


def choose(
    config: RunConfig, one_ms: float = 8.0, answer: Callable[[int], TrialResult] | None = None
) -> tuple[int, str, list[int]]:
    """The size, the warnings about it, and the sizes that were tried, on one rank."""
    process = FakeProcess(one_ms)
    if answer is not None:
        process.measure = answer
    search.TrialProcess = lambda setup: process
    size, note = choose_micro_batch(config, detect_platform(), EMULATED, Watchdog())
    return size, note, process.requested


def test_the_fastest_size_that_fits_is_chosen_and_stored(tmp_path: Path) -> None:
    config = auto_config(f"--save {tmp_path} --micro-batch-size-memory-limit 2")
    assert run_ranks(1, choose, config)[0][0] == 2
    size, note, requested = run_ranks(1, choose, config)[0]
    assert (size, note, requested) == (2, f"2, from {tmp_path / CHOICE_FILE}", []), "found before: nothing is tried"
    choice = read_choice(tmp_path / CHOICE_FILE)
    assert {each.size for each in choice.trials} == {1, 2, 4, 8}
    assert choice.limit_bytes == 2 * GIB
    (tmp_path / CHOICE_FILE).unlink()
    size, note, requested = run_ranks(1, choose, config, 3.0)[0]
    assert size == 1 and requested[-1] == 0 and {1, 2} < set(requested)
    assert "(1: 1.00 GiB 3 ms/sample, 2: 2.00 GiB 5 ms/sample, 4: does not fit: no room" in note


def test_the_search_reports_excluded_sizes_first() -> None:
    config = auto_config("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --seq-length 8")
    lines = introduction(config, [4], 2 * GIB, 4).splitlines()
    assert "divisors of the 8 sequences" in lines[0] and "(4) within 2.00 GiB" in lines[0]
    assert [line.split(":")[1] for line in lines[1:]] == [" 1 is skipped", " 2 is skipped"]
    assert "--fp8-recipe mxfp8 needs multiples of 32" in lines[1]


def test_a_signal_to_one_rank_ends_the_search_on_all(tmp_path: Path) -> None:
    config = auto_config(f"--save {tmp_path}")

    def start() -> tuple[Any, ...]:
        watchdog, process = Watchdog(), FakeProcess(8.0)

        def measure(size: int) -> TrialResult:
            if dist.get_rank() == 1:
                watchdog.record_signal(signal.SIGTERM, None)
            return FakeProcess.measure(process, size)

        process.measure = measure
        search.TrialProcess = lambda setup: process
        found, _ = choose_micro_batch(config, detect_platform(), EMULATED, watchdog)
        return found is None, len(process.requested), process.requested[-1], watchdog.exit_status, watchdog.reason

    assert run_ranks(2, start) == [(True, 2, 0, PREEMPTED, "SIGTERM to rank 1")] * 2, "one size, then closed"
    assert not (tmp_path / CHOICE_FILE).exists()


def test_the_choice_depends_on_the_linears_with_statistics() -> None:
    """A statistics step keeps copies of their master weights."""
    looks = f"--bf16 {FP8} --fp8-log-interval 2"
    of_all = search.relevant_settings(auto_config(looks))
    of_some = search.relevant_settings(auto_config(f"{looks} --fp8-log-layers layers.0.*"))
    changed = {name for name, value in of_all.items() if of_some[name] != value}
    assert changed == {"logging.fp8_log_layers"}


@pytest.mark.parametrize(
    "flags_of_memory",
    [
        "--fine-grained-activation-offloading --offload-modules core_attn", "--min-offloaded-tensor-size 1024",
        "--fp8-guard warn", "--no-one-pass-optimizer", "--moe-layer-recompute", "--reset-attention-mask",
    ],
)  # fmt: skip
def test_the_choice_depends_on_what_changes_memory(flags_of_memory: str) -> None:
    assert search.relevant_settings(auto_config()) != search.relevant_settings(auto_config(flags_of_memory))
    limits = "--distributed-timeout-minutes 7 --exit-interval 3 --log-interval 7 --seed 3"
    assert search.relevant_settings(auto_config()) == search.relevant_settings(auto_config(limits))


def test_a_choice_of_an_earlier_version_is_reused(tmp_path: Path) -> None:
    """A setting that the record lacks had its default."""
    run_ranks(1, choose, auto_config(f"--save {tmp_path}"))
    path = tmp_path / CHOICE_FILE
    content = json.loads(path.read_text())
    del content["settings"]["logging.fp8_log_layers"]
    path.write_text(json.dumps(content))
    assert not run_ranks(1, choose, auto_config(f"--save {tmp_path}"))[0][2]
    looks = f"--save {tmp_path} {FP8} --bf16 --fp8-log-interval 2 --fp8-log-layers layers.0.*"
    assert run_ranks(1, choose, auto_config(looks))[0][2]


def test_a_choice_above_a_new_memory_limit_is_repeated(tmp_path: Path) -> None:
    run_ranks(1, choose, auto_config(f"--save {tmp_path} --micro-batch-size-memory-limit 2"))
    note, requested = run_ranks(1, choose, auto_config(f"--save {tmp_path} --micro-batch-size-memory-limit 3"))[0][1:]
    assert not requested and "found within 2.00 GiB, and below --micro-batch-size-memory-limit 3" in note
    assert run_ranks(1, choose, auto_config(f"--save {tmp_path} --micro-batch-size-memory-limit 1.5"))[0][2]


def test_a_choice_of_another_run_is_not_reused(tmp_path: Path) -> None:
    run_ranks(1, choose, auto_config(f"--save {tmp_path}"))
    other = auto_config(f"--save {tmp_path} --global-batch-size 4 --lr 1e-4")
    assert run_ranks(1, choose, other)[0][2], "another batch: tried again"
    assert not run_ranks(1, choose, auto_config(f"--save {tmp_path} --global-batch-size 4 --lr 1e-5"))[0][2]


def test_a_choice_of_another_machine_is_reused_and_reported(tmp_path: Path) -> None:
    config = auto_config(f"--save {tmp_path / 'new'} --load {tmp_path}")
    run_ranks(1, choose, auto_config(f"--save {tmp_path}"))
    path = tmp_path / CHOICE_FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"memory_bytes": 80 * GIB, "device": "NVIDIA H100"}))
    size, note, requested = run_ranks(1, choose, config)[0]
    assert (size, requested) == (2, [])
    assert (
        "found on NVIDIA H100 with 80.00 GiB, this machine is" in note
        and "kept, so that the run continues unchanged" in note
    )
    path.write_text('{"micro_batch_size": 2}')
    with pytest.raises(DataError, match="is damaged .* delete it to repeat the search"):
        read_choice(path)
    with pytest.raises(AssertionError) as failed:
        run_ranks(1, choose, config)
    assert isinstance(failed.value.__cause__, CheckpointError)


def test_a_model_that_fits_at_no_size_is_an_error() -> None:
    with pytest.raises(AssertionError) as failed:
        run_ranks(1, choose, auto_config(), 1.0, lambda size: TrialResult(too_large="no room"))
    assert isinstance(failed.value.__cause__, ConfigError)
    assert "even 1 does not fit" in str(failed.value.__cause__) and "no room" in str(failed.value.__cause__)
    with pytest.raises(AssertionError, match="the trial of --micro-batch-size 8 failed: ValueError: no"):
        run_ranks(1, choose, auto_config(), 1.0, lambda size: TrialResult(error="ValueError: no"))


# ---- complete runs -------------------------------------------------------------------------------------------------

# Logits of 1,024 tokens x 8,192 ids in FP32, so that the number of sequences matters.
WHOLE = (
    "--model-preset tiny --seq-length 256 --vocab-size 8000 --mock-data --tokenizer-type NullTokenizer --num-workers 0 "
    "--global-batch-size 8 --train-iters 2 --lr 1e-3 --lr-decay-style constant --attention-dropout 0.1 "
    "--hidden-dropout 0.1 --fp8-format hybrid --fp8-recipe delayed --bf16 --num-threads 1 --eval-iters 0 "
    "--no-progress-bar"
)


def losses(folder: Path) -> list[tuple[float, float | None]]:
    return [(step.loss, step.grad_norm) for step in load_run(folder).steps]


@pytest.mark.slow
@pytest.mark.parametrize("is_tight", [False, pytest.param(True, marks=pytest.mark.long)])
def test_automatic_size_is_bit_equal_to_that_size_given(is_tight: bool, tmp_path: Path) -> None:
    """Trials change no weights, scales, random states or sample order. A later start reuses the size."""
    prepare()
    auto, given = tmp_path / "auto", tmp_path / "given"
    limit = resident_bytes() / GIB + (0.2 if is_tight else 4)
    whole = WHOLE if is_tight else f"{WHOLE} --num-layers 1 --seq-length 64 --vocab-size 1000"
    found = f"{whole} --micro-batch-size auto --micro-batch-size-memory-limit {limit:.2f} --save {auto} --load {auto}"
    ended = run_forked(1, found, timeout_s=300)
    assert ended.statuses == (0,), ended.report()
    choice = read_choice(auto / CHOICE_FILE)
    size = choice.micro_batch_size
    fitting = [trial for trial in choice.trials if trial.ms_per_sample is not None]
    assert fitting and size in {trial.size for trial in fitting}
    assert (len(fitting) < len(choice.trials)) == is_tight, "there is a limit"
    assert all(trial.peak_bytes <= choice.limit_bytes for trial in fitting)
    (event,) = (event for event in load_run(auto).events if event.name == "micro-batch size")
    assert event.detail == choice.describe()
    assert f"chosen: --micro-batch-size {size} (the fastest that fits)" in ended.output[0]
    assert run_forked(1, f"{whole} --micro-batch-size {size} --save {given}", timeout_s=300).statuses == (0,)
    assert losses(auto) == losses(given)
    tensors = sorted(path.name for path in (given / "iter_0000002").glob("*.distcp"))
    assert tensors
    for name in tensors:
        assert (auto / "iter_0000002" / name).read_bytes() == (given / "iter_0000002" / name).read_bytes()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (auto, given)]
    for config in configs:
        del config["checkpoint"]
    assert configs[0] == configs[1]
    (auto / CHOICE_FILE).write_text(json.dumps(dataclasses.asdict(choice) | {"memory_bytes": 1}))
    again = run_forked(1, found, timeout_s=300)
    assert again.statuses == (0,) and f"micro-batch size: {size}, from {auto / CHOICE_FILE}; " in again.output[0]


@pytest.mark.long
def test_ranks_agree_on_a_size(tmp_path: Path) -> None:
    prepare()
    run = f"{WHOLE} --micro-batch-size auto --save {tmp_path}"
    ended = run_forked(2, run + " --pipeline-model-parallel-size 2", timeout_s=500)
    assert ended.statuses == (0, 0), ended.report()
    assert read_choice(tmp_path / CHOICE_FILE).world_size == 2
