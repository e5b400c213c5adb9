"""Each benchmark runs at the smallest sizes and reports finite numbers."""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from saved_run import configure, save_initial

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import (
    checkpoints,
    counter_overhead,
    data_loading,
    engine_overhead,
    fp8_step_cpu,
    generation,
    gpu_train,
    long_documents,
    param_gather,
    quantize_cpu,
    startup,
    telemetry_overhead,
)

HUNG_S = 240
SIZES = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 --micro-batch-size 1 "
    "--global-batch-size 2"
)
SMALL = f"{SIZES} --warmup 1 --profile --profile-steps 1"


def result_of(main: Callable[..., Any], arguments: str, tmp_path: Path) -> Any:
    """The JSON of a benchmark run in a child process, so that this process joins no process group."""
    path = tmp_path / "result.json"

    def run() -> None:
        sys.argv = ["benchmark", *arguments.split(), "--json", str(path)]
        main()

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(HUNG_S)
    child.kill()
    assert child.exitcode == 0
    return json.loads(path.read_text())


def numbers(value: Any) -> Iterator[float]:
    """Every number in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, (int, float)):
        yield value


def test_long_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("long/a.py", 40), ("long/b.py", 40), ("short/a.py", 40)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x" * size)
    words = [str(tmp_path / "corpus"), "--folder", str(tmp_path), "--min-bytes", "60"]
    monkeypatch.setattr(sys, "argv", ["long_documents.py", *words])
    long_documents.main()
    assert (tmp_path / "corpus").read_text() == json.dumps({"text": "x" * 40 + "\n" + "x" * 40}) + "\n"


def test_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Every side with the arithmetic that it names. Its process is forked, which saves its imports."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    flags = "--model-preset tiny --vocab-size 300 --fp8-format hybrid --fp8-recipe tensorwise --no-save-optim"
    save_initial(tmp_path / "run", configure(flags))
    arguments = ["--load", str(tmp_path / "run"), "--prompt", "5 3", "--tokens", "2", "3", "--rounds", "2"]
    generation.main([*arguments, "--json", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    shown = [side["model"].partition(" layers, ")[2] for side in result.values()]
    assert shown == ["fp32, key-value cache, on cpu", "fp32, on cpu", "fp32, FP8 hybrid tensorwise, on cpu"]
    assert all(len(side["seconds"][n]) == 2 for side in result.values() for n in ("2", "3"))
    assert len(capfd.readouterr().out.splitlines()) == 5


def test_engine_overhead(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Both orders of building, and the check that both loops do the same work."""
    result = result_of(engine_overhead.main, f"{SMALL} --rounds 4 --builds 2 --control", tmp_path)
    assert set(result["times"]) == {"megafp8", "bare", "second bare"}
    assert len(result["times"]["megafp8"]["wall_ms"]) == 4
    assert any(name.endswith("train_step") for name, _, _ in result["calls"])
    assert all(math.isfinite(number) for number in numbers(result))
    assert "losses equal bit by bit" in capfd.readouterr().out


def test_engine_overhead_notices_other_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A bare loop that scales its loss is detected."""
    plain = engine_overhead.token_loss

    def halved(loss_mask: Any, losses: Any) -> Any:
        total, num_tokens, report = plain(loss_mask, losses * 0.5)
        return total, num_tokens, report

    monkeypatch.setattr(engine_overhead, "token_loss", halved)
    with pytest.raises(AssertionError):
        result_of(engine_overhead.main, f"{SMALL} --rounds 1 --builds 1", tmp_path)
    assert "the bare loop did other work" in capfd.readouterr().err


def test_fp8_step(tmp_path: Path) -> None:
    result = result_of(fp8_step_cpu.main, f"{SMALL} --micro-batch-size 2 --rounds 1", tmp_path)  # MXFP8: 32 rows
    assert set(result["times"]) == set(fp8_step_cpu.MODES)
    assert all(ms > 0 for ms in result["parts_ms"].values()), "a part's function has another name now"
    assert all(math.isfinite(number) for number in numbers(result))


def test_counter_overhead(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = result_of(counter_overhead.main, f"{SIZES} --warmup 1 --rounds 2", tmp_path)
    assert 0 < result["share"] < 1
    assert all(math.isfinite(number) for number in numbers(result))


def test_param_gather(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On one rank, which receives nothing from others and still stores codes."""
    result = result_of(param_gather.main, f"{SIZES} --warmup 0 --rounds 2", tmp_path)
    assert all(math.isfinite(number) for number in numbers(result))
    assert set(result["gathered_bytes"].values()) == {0}
    assert result["weight_bytes"]["blockwise fp8"] < result["weight_bytes"]["blockwise bf16"]
    assert "losses equal bit by bit" in capfd.readouterr().out


def test_telemetry_overhead(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = result_of(telemetry_overhead.main, f"{SIZES} --rounds 1", tmp_path)
    counts = result["operations"]
    assert counts["statistics"]["launched"] > counts["plain"]["launched"] > 0
    assert counts["statistics"]["waits"] > counts["plain"]["waits"]
    assert all(math.isfinite(number) for number in numbers([result["times"], counts, result["share"]]))
    assert "| operations | waits |" in capfd.readouterr().out


def test_quantize(tmp_path: Path) -> None:
    result = result_of(quantize_cpu.main, "--tokens 16 --matrix 64 --rounds 1", tmp_path)
    assert {case["recipe"] for case in result["casts"]} == set(quantize_cpu.RECIPES)
    assert all(math.isfinite(number) for number in numbers(result))


def test_data_loading(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = "--documents 2000 --tokens 400000 --rounds 1 --batches 3"
    result = result_of(data_loading.main, arguments, tmp_path)
    assert [row[0].split()[0] for row in result["index"]] == ["check"] * 5
    assert len(result["loader"]) == 8
    assert all(math.isfinite(number) for number in numbers(result))
    assert "the bar of 2M" in capfd.readouterr().out


def test_startup_of_help(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = result_of(startup.main, "--only-help --rounds 1 --warmup 0", tmp_path)
    assert "pretrain_gpt.py --help" in result["times"]
    assert "tools/compare_runs.py --help" in result["times"]
    assert "pretrain_gpt.py --help" in capfd.readouterr().out


def test_startup_reports_a_failing_process() -> None:
    with pytest.raises(RuntimeError, match="ended with 3:\nso it goes"):
        startup.process_times_ms(["-c", "print('so it goes'); raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="ended with 0"):
        startup.process_times_ms(["-c", "print('no step')"], until=startup.FIRST_STEP)


def test_training_on_the_tiny_shape(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = result_of(gpu_train.main, "--tiny --rounds 1 --modes bf16 --train-iters 4 --steps 3", tmp_path)
    (row,) = result["summary"]
    assert row["mode"] == "bf16"
    assert row["attention"] == "torch SDPA"
    assert row["tokens_per_second"] == pytest.approx(2 * 64 / row["step_ms"] * 1e3, rel=0.01)
    assert all(math.isfinite(number) for number in numbers(result))
    assert "torch SDPA" in capfd.readouterr().out


def test_checkpoints(tmp_path: Path) -> None:
    sizes = SIZES.replace("--hidden-size 32", "--hidden-size 64")
    result = result_of(checkpoints.main, f"{sizes} --rounds 1 --mutations 24 --folder {tmp_path}", tmp_path)
    slowed = [side.pop("slowed_ms") for side in result["stalls"].values() if "slowed_ms" in side]
    assert slowed and all(math.isfinite(number) for number in numbers(slowed)), "differences of times, also below 0"
    assert all(math.isfinite(number) and number > 0 for number in numbers(result))
    assert result["flips"][checkpoints.OURS] == {"refused": 24}
    assert sum(result["flips"][checkpoints.PLAIN].values()) == 24
    assert result["flips"][checkpoints.PLAIN]["silently wrong"] > 0, "else the check above shows nothing"
