import io
import math

import pytest

from megafp8.config.schema import LoggingConfig
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks.console import ConsoleSink, format_count


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Advances by a fixed time at each call."""

    def __init__(self, seconds: float):
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def test_lines_are_written_at_the_first_step_the_interval_and_the_end(make_step) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(LoggingConfig(log_interval=10), total_steps=23, stream=stream)
    for step in range(1, 24):
        sink.write(make_step(step))
    sink.close()
    assert [line.split("|")[0].strip() for line in stream.getvalue().splitlines()] == [
        "step  1/23",
        "step 10/23",
        "step 20/23",
        "step 23/23",
    ]


def test_a_slow_machine_gets_a_line_a_minute(make_step) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(LoggingConfig(log_interval=100), total_steps=9, stream=stream, clock=Clock(25.0))
    for step in range(1, 10):
        sink.write(make_step(step))
    assert [line.split("|")[0].strip() for line in stream.getvalue().splitlines()] == [
        "step 1/9", "step 4/9", "step 7/9", "step 9/9",
    ]  # fmt: skip


def test_the_eta_counts_samples_where_the_batch_grows(make_step) -> None:
    """Two steps of 8 samples took 1 s each; 160 samples are left, in steps of 16."""
    stream = io.StringIO()
    sink = ConsoleSink(
        LoggingConfig(log_interval=1), total_steps=13, total_samples=184, stream=stream, clock=Clock(1.0)
    )
    for step in (1, 2, 3):
        sink.write(make_step(step, global_batch_size=8, consumed_samples=8 * step))
    assert stream.getvalue().splitlines()[-1].endswith("| ETA 20.0 seconds")


def test_a_line_has_the_main_values(make_step, make_run) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(LoggingConfig(log_interval=2), total_steps=400, stream=stream, clock=Clock(0.5))
    common = {"learning_rate": 3e-4, "model_tflops_per_device": 0.125, "mfu_fraction": 0.412}
    sink.write(make_run(device_name="NVIDIA H200", device_memory_bytes=80 * 2**30))
    sink.write(make_step(118, loss=9.0, **common))
    sink.write(make_step(119, loss=3.0, step_ms=300.0, tokens_per_second=10000.0, **common))
    own = {"grad_norm": 0.5, "memory_peak_bytes": 20 * 2**30, "consumed_tokens": 12_345_678}
    sink.write(make_step(120, loss=4.0, step_ms=100.0, tokens_per_second=30000.0, **own, **common))
    assert stream.getvalue().splitlines()[-1] == (
        " step 120/400 | loss 3.5000  | grad norm    0.5 | lr 3.00e-04 |    200 ms |   15k tok/s | 12.3M tokens | "
        "20.0 GiB (25%) | 0.125 TFLOP/s per device | MFU 41.2% | ETA 2.3 minutes"
    )


def test_columns_keep_their_places(make_step) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(LoggingConfig(log_interval=1), total_steps=30, stream=stream)
    for step, (loss, norm, ms) in enumerate(((10.2, 123.4, 8123.0), (9.1, 0.0812, 99.0), (8.0, 7.0, 412.0)), start=1):
        sink.write(make_step(step, loss=loss, grad_norm=norm, step_ms=ms, tokens_per_second=1e6 / ms))
    bars = {tuple(at for at, char in enumerate(line) if char == "|")[:6] for line in stream.getvalue().splitlines()}
    assert len(bars) == 1


def test_a_cpu_has_no_throughput_and_the_first_step_no_eta(make_step, make_run) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(LoggingConfig(log_interval=1), total_steps=9, stream=stream, clock=Clock(1.0))
    sink.write(make_run())
    for step in (1, 2):
        sink.write(make_step(step, model_tflops_per_device=0.125, memory_peak_bytes=2**30))
    _, first, second = stream.getvalue().splitlines()
    assert "TFLOP" not in second and "GiB" not in second
    assert "ETA" not in first and second.endswith("ETA 7.0 seconds")


def test_long_evaluations_are_announced_and_followed(make_step, make_eval) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(LoggingConfig(log_interval=1), total_steps=9, stream=stream, clock=Clock(10.0))
    for step in (1, 2):
        sink.write(make_step(step, global_batch_size=4))
    for num_done in range(4):
        sink.show_evaluation(2, "valid", num_done, 4, 8)
    lines = [line.split(" | ")[1] for line in stream.getvalue().splitlines()[2:]]
    # 32 samples at a third of 10 s for 4 of them; a line every 15 s while the clock advances by 10 s for each batch.
    assert lines == ["validation: 4 batches of 8 samples, about 26.7 seconds", "validation: 2 of 4 batches"]
    sink.write(make_eval(2, 3.0))  # took 1.5 s
    before = len(stream.getvalue())
    sink.show_evaluation(4, "valid", 0, 4, 8)
    assert len(stream.getvalue()) == before


def test_unmeasured_and_unrequested_values_are_omitted(make_step) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(LoggingConfig(log_throughput=False), total_steps=1, stream=stream)
    sink.write(make_step(1, grad_norm=None, model_tflops_per_device=1.0, mfu_fraction=0.5))
    line = stream.getvalue()
    assert "loss 4.0000" in line
    for absent in ("grad norm", "TFLOP", "MFU", "ETA", "loss scale", "skipped"):
        assert absent not in line


def test_a_loss_that_is_not_a_number_is_shown(make_step) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(LoggingConfig(log_interval=1), total_steps=9, stream=stream)
    sink.write(make_step(1, loss=math.nan, loss_scale=1024.0, is_skipped=True))
    assert "loss nan" in stream.getvalue()
    assert "loss scale 1024" in stream.getvalue()
    assert "1 skipped" in stream.getvalue()


def test_the_mean_loss_leaves_out_skipped_steps(make_step) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(LoggingConfig(log_interval=3), total_steps=9, stream=stream)
    for step, loss in enumerate((9.0, 2.0, math.nan, 3.0), start=1):
        sink.write(make_step(step + 2, loss=loss, is_skipped=math.isnan(loss)))
    assert "loss 2.5000" in stream.getvalue() and "1 skipped" in stream.getvalue()


def test_the_eta_counts_time_between_steps(make_step) -> None:
    """Steps of 100 ms that occur every 2 s, with evaluations between them: 2 s per remaining step."""
    stream = io.StringIO()
    sink = ConsoleSink(LoggingConfig(log_interval=40), total_steps=100, stream=stream, clock=Clock(2.0))
    for step in range(1, 41):
        sink.write(make_step(step))
    assert stream.getvalue().splitlines()[-1].endswith("ETA 2.0 minutes")


def test_run_evaluation_and_event_lines(make_run, make_eval) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(LoggingConfig(), total_steps=400, stream=stream)
    sink.write(make_run(num_parameters=4_200_000, resumed_from_step=20))
    sink.write(
        make_run(
            device_name="NVIDIA H200",
            device_memory_bytes=141 * 10**9,
            peak_flops={"bf16": 989.4e12},
            peak_source="sheet",
            mfu_dtype="bf16",
        )
    )
    sink.write(
        make_run(
            device_name="NVIDIA GB300", world_size=1, layout={"data": 1}, peak_flops={"bf16": 2500e12}, mfu_dtype="fp32"
        )
    )
    sink.write(make_eval(20, 3.0))
    sink.write(make_eval(20, 3.0, split="test"))
    sink.write(EventRecord(step=20, name="checkpoint saved", detail="runs/a"))
    lines = stream.getvalue().splitlines()
    assert lines[0] == (" run 01234567 | bf16 | 2 x cpu (data 2) | 4.2M parameters | resumed from step 20")
    assert lines[1].endswith("MFU relative to 989.4 TFLOP/s bf16 (sheet)")
    assert lines[2] == " run 01234567 | bf16 | NVIDIA GB300 | no MFU: the peak of the device is unknown"
    assert lines[3] == " step  20/400 | validation loss 3.0000 | perplexity 20.09 | 65.5k tokens | 1.5 s"
    assert " test loss 3.0000" in lines[4]
    assert lines[5] == " step  20/400 | checkpoint saved: runs/a"


@pytest.mark.parametrize("verbose", [True, False])
def test_how_a_run_was_built_is_shown_on_request(verbose: bool) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(LoggingConfig(verbose=verbose), total_steps=400, stream=stream)
    for name in ("optimizer", "parameter gather", "threads"):
        sink.write(EventRecord(step=0, name=name, detail="as it is"))
    names = [line.split(" | ")[1].partition(":")[0] for line in stream.getvalue().splitlines()]
    assert names == (["optimizer", "parameter gather", "threads"] if verbose else ["threads"])


def test_the_bar_shows_on_a_terminal_only(make_step) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        sink = ConsoleSink(LoggingConfig(log_interval=1), total_steps=3, stream=stream)
        for step in range(1, 4):
            sink.write(make_step(step))
        sink.close()
    assert "\r" not in pipe.getvalue()
    assert len(pipe.getvalue().splitlines()) == 3
    assert "0/3" in terminal.getvalue()
    for line in pipe.getvalue().splitlines():
        assert line.split(" | ETA")[0] in terminal.getvalue()


@pytest.mark.parametrize("stream_type", [Terminal, io.StringIO])
def test_the_flag_overrides_the_terminal(make_step, stream_type: type) -> None:
    shown = {}
    for progress_bar in (True, False):
        stream = stream_type()
        sink = ConsoleSink(LoggingConfig(progress_bar=progress_bar), total_steps=3, stream=stream)
        sink.write(make_step(1))
        sink.close()
        shown[progress_bar] = "\r" in stream.getvalue()
    assert shown == {True: True, False: False}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7.5, "7.5"), (999, "999"), (999.9, "1k"), (12345, "12.3k"), (4.2e6, "4.2M"), (8.03e9, "8.03G")],
)
def test_format_count(value: float, text: str) -> None:
    assert format_count(value) == text
