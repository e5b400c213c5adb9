"""Sinks for TensorBoard, Weights & Biases and MLflow, with the scalar names of Megatron-LM.

TensorBoard event files are written without torch or TensorFlow. tensorboard's `EventFileWriter` is not used, because
its thread ends at the first disk error. `LogFile` continues after one. Nor is its `RecordWriter`, whose checksums are
made in Python: 100 ms for the statistics of one step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional, Union

from megafp8.config.schema import LoggingConfig
from megafp8.errors import CapabilityError
from megafp8.metrics.expert_statistics import expert_groups, expert_of, exponent_counts, spread_of
from megafp8.metrics.records import (
    TEST,
    VALID,
    VALID_EMA,
    VALID_HIGH_PRECISION,
    EvalRecord,
    EventRecord,
    ExpertRecord,
    GuardRecord,
    QuantizationRecord,
    Record,
    RunRecord,
    SampleRecord,
    StepRecord,
    TensorStats,
)
from megafp8.utils.best_effort import LogFile, Outage
from megafp8.utils.process import package_environment

# First event of a file, which readers require.
FILE_VERSION = "brain.Event:2"
WANDB_ID_FILE = "wandb_run_id"
VERSUS_SAMPLES = ("lm loss", "learning-rate")
# For MLflow's last records; a signal leaves a run little more before it is killed.
MLFLOW_CLOSE_S = 10.0


class TensorBoardSink:
    """Writes scalars over steps; loss and learning rate also over samples, as Megatron-LM does.

    A run record writes the configuration as text. After a resumption TensorBoard hides the points of repeated steps.
    """

    def __init__(self, folder: Union[str, Path], logging: LoggingConfig):
        """
        Args:
            logging: `--tensorboard-log-interval` is the number of steps between points; evaluations and quantization
                statistics are always written.

        Raises:
            CapabilityError: tensorboard or google-crc32c is not installed.
        """
        try:
            import google_crc32c
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
        except ImportError as error:
            raise CapabilityError(
                f"TensorBoard files need the packages tensorboard and google-crc32c, not all of which can be imported "
                f"({error}): pip install tensorboard google-crc32c, or remove --save and --tensorboard-dir"
            ) from error
        self._crc32c = google_crc32c.value
        self._event_pb2, self._summary_pb2 = event_pb2, summary_pb2
        self._tensor_pb2, self._tensor_shape_pb2 = tensor_pb2, tensor_shape_pb2
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{nanoseconds:09d}"
        self._file = LogFile(Path(folder) / name, "TensorBoard events", is_text=False)
        self._add_event(0, is_header=True, file_version=FILE_VERSION)
        self._logging = logging

    def write(self, record: Record) -> None:
        if isinstance(record, RunRecord):
            self._write_run(record)
        elif isinstance(record, SampleRecord):
            lines = (record.prompt + record.text).split("\n")
            code = "\n".join(f"    {line}" for line in lines)  # Markdown leaves it as it is
            self._add_text(f"samples/{record.prompt[:60] or 'new document'}", code, record.step)
        elif isinstance(record, (EvalRecord, QuantizationRecord, GuardRecord, ExpertRecord)):
            self._add_scalars(scalars(record), record.step)
            if isinstance(record, QuantizationRecord):
                self._add_histograms(record)
        elif isinstance(record, StepRecord) and record.step % self._logging.tensorboard_log_interval == 0:
            values = scalars(
                record,
                with_memory=self._logging.log_memory_to_tensorboard,
                with_timers=self._logging.log_timers_to_tensorboard,
            )
            self._add_scalars(values, record.step)
            versus_samples = {f"{name} vs samples": values[name] for name in VERSUS_SAMPLES}
            self._add_scalars(versus_samples, record.consumed_samples)

    def close(self) -> None:
        self._file.close()

    def _write_run(self, record: RunRecord) -> None:
        first_step = (record.resumed_from_step or 0) + 1
        session = self._event_pb2.SessionLog(status=self._event_pb2.SessionLog.START)
        self._add_event(first_step, is_header=True, session_log=session)
        settings = json.dumps(record.config, indent=2, default=str)
        self._add_text("config/text_summary", f"```\n{settings}\n```", first_step, is_header=True)

    def _add_scalars(self, values: dict[str, float], step: int) -> None:
        items = [self._summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add_event(step, summary=self._summary_pb2.Summary(value=items))

    def _add_histograms(self, record: QuantizationRecord) -> None:
        """Write the histograms of codes by exponent, `fp8/exponents/TENSOR`."""
        items = []
        for name, counts in exponent_counts(record.tensors):
            edges = exponent_edges(counts)
            middles = [edge + 0.5 for edge in edges[:-1]]
            histogram = self._summary_pb2.HistogramProto(
                min=edges[0],
                max=edges[-1],
                num=sum(counts),
                sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
                sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
                bucket_limit=edges[1:],
                bucket=counts,
            )
            items.append(self._summary_pb2.Summary.Value(tag=f"fp8/exponents/{name}", histo=histogram))
        self._add_event(record.step, summary=self._summary_pb2.Summary(value=items))

    def _add_text(self, tag: str, text: str, step: int, *, is_header: bool = False) -> None:
        """Write a text, which TensorBoard shows as Markdown."""
        summary_pb2, shape_pb2 = self._summary_pb2, self._tensor_shape_pb2
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        tensor = self._tensor_pb2.TensorProto(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape=shape_pb2.TensorShapeProto(dim=[shape_pb2.TensorShapeProto.Dim(size=1)]),
        )
        metadata = summary_pb2.SummaryMetadata(plugin_data=plugin)
        value = summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._add_event(step, is_header=is_header, summary=summary_pb2.Summary(value=[value]))

    def _add_event(self, step: int, *, is_header: bool = False, **content: Any) -> None:
        event = self._event_pb2.Event(wall_time=time.time(), step=step, **content)
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        # A record of a TFRecord file: the length, its checksum, the data and their checksum, little-endian.
        framed = length + self._masked_checksum(length) + data + self._masked_checksum(data)
        self._file.append(framed, is_header=is_header)

    def _masked_checksum(self, data: bytes) -> bytes:
        checksum = self._crc32c(data)
        return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class WandbSink:
    """Logs every step, quantization statistics and evaluation to one W&B run, with the run record as configuration.

    A resumed run continues its W&B run, whose ID is in the run folder. Of steps that it repeats, W&B keeps the values
    that it has. Without a login or the service, the run is written to local files.

    Best effort: wandb raises many kinds of exceptions for failures of the service, network or disk. All of them are
    reported and counted, and none stops the run.
    """

    def __init__(self, logging: LoggingConfig, run_folder: Optional[str] = None):
        """
        Raises:
            CapabilityError: wandb is not installed.
        """
        try:
            import wandb
        except ImportError as error:
            raise CapabilityError(
                f"--wandb-project {logging.wandb_project} needs the package wandb, which cannot be imported ({error}): "
                "pip install wandb, or remove the flag (records.jsonl and TensorBoard have the same values)"
            ) from error
        self._wandb = wandb
        self._samples: list[SampleRecord] = []
        self._outage = Outage("Weights & Biases", "records")
        self._run: Any = None
        id_file = None if run_folder is None else Path(run_folder) / WANDB_ID_FILE
        arguments = {
            "project": logging.wandb_project,
            "entity": logging.wandb_entity,
            "name": logging.wandb_exp_name,
            "dir": logging.wandb_save_dir,
        }
        try:
            if id_file is not None and id_file.exists():
                arguments |= {"id": id_file.read_text(encoding="utf-8").strip(), "resume": "allow"}
            self._run = start_wandb(wandb, arguments)
            if id_file is not None:
                id_file.write_text(f"{self._run.id}\n", encoding="utf-8")
        except Exception as error:
            self._outage.failed(error)

    def write(self, record: Record) -> None:
        if isinstance(record, EventRecord):
            return
        if self._run is None:  # another wandb.init would block training until it times out
            self._outage.lose(1)
            return
        try:
            self._log(record)
        except Exception as error:
            self._outage.failed(error, num_lost=1)
        else:
            self._outage.ended()

    def close(self) -> None:
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as error:
                self._outage.failed(error)
        self._outage.close()

    def _log(self, record: Union[RunRecord, SampleRecord, ScalarRecord]) -> None:
        if isinstance(record, RunRecord):
            self._run.config.update(dataclasses.asdict(record), allow_val_change=True)
            return
        if isinstance(record, SampleRecord):
            # The table of a step has all its texts: of one that is logged twice, W&B keeps the later one.
            self._samples = [each for each in self._samples if each.step == record.step] + [record]
            rows = [[each.step, each.prompt, each.text] for each in self._samples]
            self._run.log(
                {"samples": self._wandb.Table(columns=["step", "prompt", "text"], data=rows)}, step=record.step
            )
            return
        # W&B keeps a row open until a later step arrives, so an evaluation is added to the row of its step.
        values: dict[str, Any] = dict(scalars(record))
        if isinstance(record, QuantizationRecord):
            values |= {
                f"fp8/exponents/{name}": self._wandb.Histogram(np_histogram=(counts, exponent_edges(counts)))
                for name, counts in exponent_counts(record.tensors)
            }
        self._run.log(values, step=record.step)
        if isinstance(record, EvalRecord):
            self._run.summary[f"final {record.split} loss"] = record.loss


def start_wandb(wandb: Any, arguments: Mapping[str, Optional[str]]) -> Any:
    """A W&B run, as local files if there is no login or no service."""
    try:
        return wandb.init(**arguments)
    except Exception as error:
        run = wandb.init(**arguments, mode="offline")
        folder = Path(run.dir).parent
        print(f"warning: Weights & Biases is offline ({error}); later: wandb login && wandb sync {folder}", flush=True)
        return run


class MlflowSink:
    """Starts the process that sends records.jsonl to MLflow (`mlflow_sender`), and ends it.

    Best effort: that process reports failures of MLflow, and this sink its end. Neither stops the run.
    """

    def __init__(self, logging: LoggingConfig, run_folder: str, last_step: int):
        """
        Args:
            last_step: of the run; MLflow shows a run that ends before it as killed.
        """
        self._outage = Outage("MLflow", "records", "training continues, the next start of the run sends the rest")
        destination = {
            "folder": os.path.abspath(run_folder),
            "experiment": logging.mlflow_experiment,
            "run_name": logging.mlflow_run_name,
            "tracking_uri": logging.mlflow_tracking_uri,
            "last_step": last_step,
        }
        self._process: Optional[subprocess.Popen[bytes]] = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megafp8.metrics.sinks.mlflow_sender", json.dumps(destination)],
                stdin=subprocess.PIPE, env=package_environment(),
            )  # fmt: skip
        except OSError as error:
            self._outage.failed(error)

    def write(self, record: Record) -> None:
        """The process reads the file of the records; here only its end is noticed."""
        if self._process is not None and (status := self._process.poll()) is not None:
            self._outage.failed(RuntimeError(f"the process that sends records ended with status {status}"))

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.write(b".")  # forked processes may keep the pipe open
            self._process.stdin.close()
        try:
            self._process.wait(MLFLOW_CLOSE_S)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            self._process.wait()
            self._outage.failed(error)


ScalarRecord = Union[StepRecord, QuantizationRecord, GuardRecord, EvalRecord, ExpertRecord]
EVAL_NAMES = {
    VALID: "validation", VALID_HIGH_PRECISION: "validation high precision", VALID_EMA: "validation EMA", TEST: "test",
}  # fmt: skip
TASK_PREFIXES = {VALID_HIGH_PRECISION: "tasks high precision", VALID_EMA: "tasks EMA"}
TASK_FIELDS = ("accuracy", "normalized_accuracy", "bits_per_byte")
TENSOR_FIELDS = ("amax", "num_non_finite", "quant_scale_min", "quant_scale_max", "scale_spread_octaves",
                 "underflow_fraction", "saturated_fraction", "sqnr_db", "mean_local_sqnr_db", "staleness_octaves",
                 "outlier_octaves", "update_to_weight", "codes_changed_fraction")  # fmt: skip
MODEL_FIELDS = ("gradient_signal", "gradient_noise", "gradient_noise_scale", "gradient_snr", "update_to_weight",
                "codes_changed_fraction")  # fmt: skip


def labels(record: RunRecord) -> dict[str, str]:
    """What tells runs apart."""
    return {"recipe": record.recipe, "device": record.device_name, "ranks": str(record.world_size)}


def scalars(record: ScalarRecord, *, with_memory: bool = True, with_timers: bool = True) -> dict[str, float]:
    """The measured scalars of one record.

    Scores of tasks are named `tasks/FIELD/TASK`, `tasks high precision/FIELD/TASK` or `tasks EMA/FIELD/TASK`.

    The load of experts is named `experts/FIELD/layer N`, statistics of `--fp8-guard` `guard/STATISTIC/NAME`.

    Quantization statistics are named `fp8/FIELD/TENSOR`, those of what-if recipes `what-if/RECIPE/FIELD/TENSOR`. The
    experts of a layer have their mean, and under `worst/FIELD/TENSOR` and `worst-expert/FIELD/TENSOR` the value and the
    number of the worst expert.
    "iteration-time" and the timers are in seconds, "throughput" in TFLOP/s per device, as in Megatron-LM.
    """
    if isinstance(record, QuantizationRecord):
        return dict(_quantization_scalars(record))
    if isinstance(record, GuardRecord):
        return {
            f"guard/{statistic}/{name}": value
            for statistic, values in record.statistics.items()
            for name, value in values.items()
        }
    if isinstance(record, ExpertRecord):
        return {
            f"experts/{field}/layer {layer}": float(value)
            for layer, load in record.layers.items()
            for field, value in dataclasses.asdict(load).items()
            if isinstance(value, (int, float))
        }
    if isinstance(record, EvalRecord):
        name = f"lm loss {EVAL_NAMES[record.split]}"
        prefix = TASK_PREFIXES.get(record.split, "tasks")
        return {name: record.loss, f"{name} ppl": record.perplexity} | {
            f"{prefix}/{field}/{task}": value
            for task, scores in (record.tasks or {}).items()
            for field in TASK_FIELDS
            if (value := getattr(scores, field)) is not None
        }
    values = {
        "lm loss": record.loss,
        "learning-rate": record.learning_rate,
        "grad-norm": record.grad_norm,
        "grad-clip-factor": record.clip_factor,
        "iteration-time": record.step_ms / 1000,
        "tokens-per-second": record.tokens_per_second,
        "throughput": record.model_tflops_per_device,
        "mfu": record.mfu_fraction,
        "loss-scale": record.loss_scale,
        "num-zeros": record.num_zeros_in_grad,
        "max_attention_logit": record.max_attention_logit,
        "clipped-heads": record.num_clipped_heads,
        "params-norm": record.params_norm,
        "param-gather-bytes": record.param_gather_bytes,
        "grad-reduce-bytes": record.grad_reduce_bytes,
        "grad-intra-node-bytes": record.grad_intra_node_bytes,
        "grad-underflow-fraction": record.grad_underflow_fraction,
        "grad-saturated-fraction": record.grad_saturated_fraction,
        "grad-scale-factor": record.grad_scale_factor,
        "non-finite-operands": record.num_non_finite_operands,
        "saturated-operands": record.num_saturated_operands,
        "joules-per-token": record.joules_per_token,
        "power/gpu": record.watts_per_device,
        "gpu-busy-fraction": record.gpu_busy_fraction,
        "batch-size": record.global_batch_size,
    }
    values |= {f"mtp_{depth} loss": loss for depth, loss in enumerate(record.mtp_losses or (), start=1)}
    if with_memory:
        values["mem-max-allocated-bytes"] = record.memory_peak_bytes
    if with_timers:
        values |= {f"{name}-time": ms / 1000 for name, ms in (record.timers_ms or {}).items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def _quantization_scalars(record: QuantizationRecord) -> Iterator[tuple[str, float]]:
    recipes = {"fp8": record.tensors} | {f"what-if/{name}": tensors for name, tensors in record.what_if.items()}
    for prefix, tensors in recipes.items():
        for tensor, stats in tensors.items():
            for field in TENSOR_FIELDS if expert_of(tensor) is None else ():
                if (value := getattr(stats, field)) is not None:
                    yield f"{prefix}/{field}/{tensor}", float(value)
        for tensor, experts in expert_groups(tensors).items():
            for field in TENSOR_FIELDS:
                if (spread := spread_of(experts, field)) is not None:
                    yield f"{prefix}/{field}/{tensor}", spread.mean
                    yield f"{prefix}/worst/{field}/{tensor}", spread.worst
                    yield f"{prefix}/worst-expert/{field}/{tensor}", float(spread.worst_expert)
    yield from _aggregates(record.tensors)
    for field in MODEL_FIELDS:
        if (value := getattr(record, field)) is not None:
            yield f"fp8/{field}", value


def _aggregates(tensors: Mapping[str, TensorStats]) -> Iterator[tuple[str, float]]:
    """`fp8/fwd_scale` and `fp8/amax_fwd` of inputs and weights, `fp8/bwd_scale` and `fp8/amax_bwd` of gradients.

    Each is the median over the tensors, with the extremes as `_min` and `_max`. The scale of a tensor with one for each
    block is the smallest.
    """
    for direction, is_forward in (("fwd", True), ("bwd", False)):
        chosen = [stats for name, stats in tensors.items() if ("grad_output" not in name) is is_forward]
        scales = [stats.quant_scale_min for stats in chosen if stats.quant_scale_min is not None]
        for name, values in ((f"{direction}_scale", scales), (f"amax_{direction}", [stats.amax for stats in chosen])):
            if values:
                yield f"fp8/{name}", statistics.median(values)
                yield f"fp8/{name}_min", min(values)
                yield f"fp8/{name}_max", max(values)


def exponent_edges(counts: Sequence[int]) -> list[float]:
    """Edges of the bins of `exponent_counts`: zeros are at -1, subnormals at 0, then the exponent fields."""
    return [index - 1.5 for index in range(len(counts) + 1)]
