import dataclasses
import math
import shutil
import statistics
import subprocess
import sys

import pytest

from megafp8.config.schema import LoggingConfig
from megafp8.errors import CapabilityError
from megafp8.metrics.records import GuardRecord
from megafp8.metrics.sinks.trackers import TensorBoardSink


def read_scalars(folder) -> dict[str, dict[int, float]]:
    accumulator_module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulator_module.EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: {e.step: e.value for e in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]}


def test_scalars_have_the_names_and_units_of_megatron(tmp_path, make_run, make_step, make_eval) -> None:
    sink = TensorBoardSink(tmp_path, LoggingConfig())
    sink.write(make_run())
    sink.write(make_step(2, loss=3.5, model_tflops_per_device=400.0, timers_ms={"forward": 50.0}))
    sink.write(make_eval(2, 3.0))
    sink.write(make_eval(2, 3.25, split="test"))
    sink.close()
    values = read_scalars(tmp_path)
    assert values["lm loss"] == {2: 3.5}
    assert values["lm loss vs samples"] == {32: 3.5}
    assert values["learning-rate"] == {2: pytest.approx(3e-4)}
    assert values["grad-norm"] == {2: 1.25}
    assert values["iteration-time"] == {2: pytest.approx(0.1)}
    assert values["throughput"] == {2: 400.0}
    assert values["lm loss validation"] == {2: 3.0}
    assert values["lm loss validation ppl"] == {2: pytest.approx(math.exp(3.0))}
    assert values["lm loss test"] == {2: 3.25}
    assert "mfu" not in values
    assert "forward-time" not in values


def test_options_select_the_written_values(tmp_path, make_step) -> None:
    logging = LoggingConfig(tensorboard_log_interval=3, log_memory_to_tensorboard=True, log_timers_to_tensorboard=True)
    sink = TensorBoardSink(tmp_path, logging)
    for step in range(1, 8):
        sink.write(make_step(step, memory_peak_bytes=2**30, timers_ms={"forward": 50.0}))
    sink.close()
    values = read_scalars(tmp_path)
    assert list(values["lm loss"]) == [3, 6]
    assert values["mem-max-allocated-bytes"] == {3: 2**30, 6: 2**30}
    assert values["forward-time"] == {3: pytest.approx(0.05), 6: pytest.approx(0.05)}


def test_a_resumed_run_hides_rolled_back_points(tmp_path, make_run, make_step) -> None:
    """Two event files, as written by two processes: of steps 3 and 4 only the second one's remain."""
    first = TensorBoardSink(tmp_path, LoggingConfig())
    first.write(make_run())
    for step in range(1, 5):
        first.write(make_step(step, loss=9.0))
    first.close()
    (old,) = tmp_path.iterdir()
    old.rename(old.with_name(old.name.replace("tfevents.", "tfevents.0")))  # sorts before, like an older time
    second = TensorBoardSink(tmp_path, LoggingConfig())
    second.write(make_run(resumed_from_step=2))
    second.write(make_step(3, loss=1.0))
    second.close()
    assert read_scalars(tmp_path)["lm loss"] == {1: 9.0, 2: 9.0, 3: 1.0}


def test_the_configuration_is_a_text(tmp_path, make_run) -> None:
    sink = TensorBoardSink(tmp_path, LoggingConfig())
    sink.write(make_run(config={"model": {"num_layers": 17}}))
    sink.close()
    accumulator_module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulator_module.EventAccumulator(str(tmp_path))
    accumulator.Reload()
    (event,) = accumulator.Tensors("config/text_summary")
    assert b'"num_layers": 17' in event.tensor_proto.string_val[0]


@pytest.mark.parametrize("missing", ["tensorboard.compat.proto", "google_crc32c"])
def test_without_a_package_the_error_names_the_fix(missing, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(CapabilityError, match="pip install tensorboard google-crc32c"):
        TensorBoardSink(tmp_path, LoggingConfig())


def test_neither_torch_nor_tensorflow_is_imported_for_it(tmp_path) -> None:
    code = (
        "import sys; from megafp8.config.schema import LoggingConfig; "
        "from megafp8.metrics.sinks import TensorBoardSink; assert 'tensorboard' not in sys.modules; "
        f"TensorBoardSink({str(tmp_path)!r}, LoggingConfig()).close(); "
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_quantization_statistics_are_scalars_and_histograms(tmp_path, make_statistics) -> None:
    sink = TensorBoardSink(tmp_path, LoggingConfig(tensorboard_log_interval=1000))
    record = make_statistics(100, of_input={"sqnr_db": math.inf}, gradient_noise_scale=12.5)
    sink.write(dataclasses.replace(record, what_if={"mxfp8": record.tensors}))
    sink.close()
    values = read_scalars(tmp_path)
    assert values["fp8/underflow_fraction/layers.0.linear_fc1.input"] == {100: 0.25}
    assert values["fp8/sqnr_db/layers.0.linear_fc1.input"] == {100: math.inf}
    assert values["fp8/gradient_noise_scale"] == {100: 12.5}
    assert values["what-if/mxfp8/amax/layers.0.linear_fc1.weight"] == {100: 2.0}
    assert "fp8/update_to_weight/layers.0.linear_fc1.input" not in values
    amaxes = {name: stats.amax for name, stats in record.tensors.items()}
    gradients = [amax for name, amax in amaxes.items() if "grad_output" in name]
    assert values["fp8/amax_bwd"] == {100: statistics.median(gradients)}
    assert values["fp8/amax_fwd_max"] == {100: max(amax for name, amax in amaxes.items() if "grad_output" not in name)}
    accumulator_module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulator_module.EventAccumulator(str(tmp_path))
    accumulator.Reload()
    (event,) = accumulator.Histograms("fp8/exponents/layers.0.linear_fc1.grad_output")
    histogram = event.histogram_value
    assert (event.step, histogram.num, histogram.min, histogram.max) == (100, 8, -1.5, 2.5)
    assert (histogram.bucket, histogram.bucket_limit) == ([1, 2, 1, 4], [-0.5, 0.5, 1.5, 2.5])
    assert (histogram.sum, histogram.sum_squares) == (1 * -1 + 1 * 1 + 4 * 2, 1 + 1 + 4 * 4)


def test_statistics_of_the_guard_are_scalars(tmp_path) -> None:
    sink = TensorBoardSink(tmp_path, LoggingConfig(tensorboard_log_interval=1000))
    sink.write(GuardRecord(step=20, statistics={"attention logits": {"layers.0": 7.5, "layers.1": math.inf}}))
    sink.close()
    assert read_scalars(tmp_path) == {
        "guard/attention logits/layers.0": {20: 7.5}, "guard/attention logits/layers.1": {20: math.inf}
    }  # fmt: skip


def test_a_temporarily_missing_folder_loses_only_its_content(tmp_path, make_run, make_step, capsys) -> None:
    """A file takes its place, and then it can be created again: a complete event file, with the session's start."""
    folder = tmp_path / "boards"
    sink = TensorBoardSink(folder, LoggingConfig())
    sink.write(make_run(config={"model": {"num_layers": 17}}))
    sink.write(make_step(1))
    shutil.rmtree(folder)
    folder.write_text("")
    sink.write(make_step(2))
    sink.write(make_step(3))
    folder.unlink()
    sink.write(make_step(4))
    sink.close()
    assert list(read_scalars(folder)["lm loss"]) == [2, 3, 4]
    accumulator_module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulator_module.EventAccumulator(str(folder))
    accumulator.Reload()
    assert "config/text_summary" in accumulator.Tags()["tensors"]
    warnings = capsys.readouterr().out.splitlines()
    assert [("a file has its name" in text, "nothing was lost" in text) for text in warnings] == [
        (True, False), (False, True)
    ]  # fmt: skip


def test_a_folder_that_is_a_file_from_the_start(tmp_path, make_run, make_step, capsys) -> None:
    (tmp_path / "boards").write_text("")
    sink = TensorBoardSink(tmp_path / "boards", LoggingConfig())
    sink.write(make_run())
    sink.write(make_step(1))
    sink.close()
    warnings = capsys.readouterr().out.splitlines()
    assert len(warnings) == 2
    assert warnings[1].endswith("5 TensorBoard events were lost in all"), "of the version, run (2) and step (2)"
