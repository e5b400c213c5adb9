"""Schema of a run's records: one JSON object per line of records.jsonl, from which all reports are made.

The field `kind` names the kind of a record: `run` at the start and after every resumption, `step` for each optimizer
step, `quantization` for each statistics step, `guard` for each one of `--fp8-guard`, `experts` for the load of experts,
`eval` for each validation or test, `sample` for each generated text, and `event` for anything else (checkpoint saved,
health warning, reason for stopping).

The lines are strict JSON, which has no NaN and no infinity. Losses may become non-finite, so these values are written
as the strings "nan", "inf" and "-inf", and read back as numbers where the schema declares a float. Inside `config`,
which has no schema here, they stay strings.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional, Union

from megafp8.errors import DataError
from megafp8.metrics.expert_load import ExpertRecord
from megafp8.utils.files import UnreadableFile
from megafp8.utils.formatting import utc_now
from megafp8.utils.plain_data import Float, from_plain
from megafp8.utils.strict_json import parse_json

RECORDS_FILE = "records.jsonl"
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The start or a resumption of a run.

    It supersedes earlier records of steps after `resumed_from_step`, since the run repeats those steps.
    """

    kind: ClassVar[str] = "run"

    config_hash: str
    """Stable hash of the resolved configuration."""
    config: dict[str, Any]
    """The resolved configuration, section by section."""
    world_size: int
    layout: dict[str, int]
    """Size of each parallel axis: tensor, context, pipeline, virtual, data."""
    recipe: str
    """Number formats of the linears, for tables and legends: "bf16", "fp8 hybrid tensorwise (TE)"."""
    device_name: str
    device_memory_bytes: Optional[int] = None
    """Memory of one GPU; None on a CPU, and in records of earlier versions."""
    num_threads: Optional[int] = None
    """CPU threads of each rank. On a CPU the last bits of results depend on it."""
    precision_map: dict[str, str] = field(default_factory=dict)
    """Under a precision map, the resolved recipes by linear and layers; empty if all linears have the same."""
    peak_flops: Optional[dict[str, Float]] = None
    """Dense peak FLOP/s of one device by dtype; None for an unknown device."""
    peak_source: Optional[str] = None
    mfu_dtype: Optional[str] = None
    """The dtype whose peak is the denominator of `StepRecord.mfu_fraction`."""
    num_parameters: Optional[int] = None
    flops_per_token: Optional[Float] = None
    """Model FLOPs of one token, forward and backward."""
    fresh_tokens: Optional[int] = None
    """Training tokens before a document is read again; None without training data, and with phases of data."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of megafp8, Python and the numerical libraries."""
    cuda_versions: dict[str, Optional[str]] = field(default_factory=dict)
    """Of cuBLASLt, cuDNN, NCCL, NVSHMEM and the driver; None where one is absent. Empty in records of earlier
    versions."""
    resumed_from_step: Optional[int] = None
    """Step of the loaded checkpoint; None for a run that starts at step 0."""
    started_at: str = field(default_factory=utc_now)
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class OperandCounts:
    """Values of one operand for one GEMM that quantization hides, over all ranks."""

    non_finite: int
    """NaN or infinity."""
    saturated: int
    """Finite, and at least half a step beyond the largest number that the scale expresses."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step. Rates are those of the job unless the name says `per_device`."""

    kind: ClassVar[str] = "step"

    step: int
    """Counted from 1: the number of steps done after this one."""
    consumed_samples: int
    consumed_tokens: int
    loss: Float
    """Mean over the tokens of the global batch, in nats."""
    learning_rate: Float
    step_ms: Float
    """From the end of the previous step to the end of this one, without `between_ms`; of the first step of a process,
    from its start. Work on the records of the previous step is part of it. Earlier versions left out what the host did
    between two steps."""
    tokens_per_second: Float
    global_batch_size: Optional[int] = None
    """Sequences of the step; None in records of earlier versions."""
    document_squares: Optional[Float] = None
    """Sum of the squared lengths of all documents of the step, with `--reset-attention-mask`: over the tokens it is the
    length of a token's document, which replaces the sequence length in `model_tflops_per_device`."""
    mtp_losses: Optional[tuple[Float, ...]] = None
    """Mean loss of each depth of multi-token prediction, in nats and without its factor; None without it."""
    grad_norm: Optional[Float] = None
    """Global norm before clipping."""
    clip_factor: Optional[Float] = None
    """What clipping multiplied the gradients with; None in skipped steps and in records of earlier versions."""
    model_tflops_per_device: Optional[Float] = None
    mfu_fraction: Optional[Float] = None
    """Model FLOP/s over the peak that the run record names; None if the peak is not known."""
    loss_scale: Optional[Float] = None
    """None without loss scaling."""
    num_zeros_in_grad: Optional[int] = None
    max_attention_logit: Optional[Float] = None
    """The largest visible product of a query and a key, scaled and before softcapping, of all layers and microbatches;
    None without `--log-max-attention-logit` and `--qk-clip`."""
    num_clipped_heads: Optional[int] = None
    """Groups of heads with one key whose weights `--qk-clip` shrank after the step; None without it."""
    params_norm: Optional[Float] = None
    memory_peak_bytes: Optional[int] = None
    """Peak memory so far of any device of the job."""
    param_gather_bytes: Optional[int] = None
    """Bytes that rank 0 received in the distributed optimizer's parameter all-gather, with scales and padding. With
    overlapped gathers these are the weights that the previous step updated. A step replayed from a CUDA graph has the
    bytes of the capture. A validation's gathers count to the step after it."""
    grad_reduce_bytes: Optional[int] = None
    """Bytes that rank 0 received in the data-parallel reduction of gradients, with scales and padding; an all-reduce
    counts both phases of a ring. A step replayed from a CUDA graph has the bytes of the capture."""
    grad_intra_node_bytes: Optional[int] = None
    """Of `grad_reduce_bytes`, those from ranks of the same node, with --grad-reduce-fp8-intra-node bf16 or fp32, or of
    the same replica, with --grad-reduce-in-fp8 and several replicas. The others came from other nodes or replicas."""
    grad_underflow_fraction: Optional[Float] = None
    """With --grad-reduce-in-fp8: of the nonzero gradients of all ranks that are sent as codes, those that became 0."""
    grad_saturated_fraction: Optional[Float] = None
    """The same of those beyond the largest number that their scale expresses."""
    grad_scale_factor: Optional[Float] = None
    """The automatic factor of the step, with --grad-reduce-fp8-scaling tensor."""
    joules_per_token: Optional[Float] = None
    """With --log-energy, in a logged step: what all devices took since the last logged step, for a trained token."""
    watts_per_device: Optional[Float] = None
    """Their mean power in this time."""
    gpu_busy_fraction: Optional[Float] = None
    """With --log-energy, in a logged step: of the driver's last sampling period (up to 1 s), the time in which a kernel
    ran, as the mean of all devices. It says nothing of how well kernels use a device: see `mfu_fraction`."""
    is_skipped: bool = False
    """The update was skipped: an event says why, or gradients overflowed at the loss scale."""
    is_repeated: bool = False
    """The experts of a rank got more tokens, or a microbatch had more documents, than the CUDA graph has room for: the
    step was computed again, kernel by kernel."""
    num_non_finite_operands: Optional[int] = None
    """Non-finite values that linears quantized in this step; one counts for each GEMM that reads it and for each copy
    on a rank. None where they are not counted."""
    num_saturated_operands: Optional[int] = None
    operand_counts: Optional[dict[str, OperandCounts]] = None
    """Both by operand and GEMM where they are not zero: `layers.3.linear_fc2.input.fprop`. In steps with non-finite
    operands, and in multiples of --log-interval."""
    timers_ms: Optional[dict[str, Float]] = None
    """Time of parts of the step, by name; `records` is what the host does for the records of the previous step, and
    `data-wait` the time that rank 0 waits for its batches."""
    between_ms: Optional[dict[str, Float]] = None
    """Time since the end of the previous step that is in the time of no step, by name: validation, checkpoints, replica
    check, calibration, profile, samples, rollback (with the steps that it repeats). None without any, and in records of
    earlier versions."""


VALID, VALID_HIGH_PRECISION, VALID_EMA, TEST = SPLITS = "valid", "valid-high-precision", "valid-ema", "test"


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """Scores of the questions of a task file."""

    num_questions: int
    bits_per_byte: Float
    """Of the right answers: their information in bits over their bytes of UTF-8."""
    accuracy: Optional[Float] = None
    """Share of the questions whose right choice has the largest log-likelihood; None without choices."""
    normalized_accuracy: Optional[Float] = None
    """The same with the log-likelihood for each byte of the choice."""
    num_truncated: int = 0
    """Questions whose context was cut at the start, since they were longer than a sequence."""


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One evaluation on held-out data."""

    kind: ClassVar[str] = "eval"

    step: int
    split: str
    """"valid" or "test"; of validation data in high precision "valid-high-precision", and with the moving average of
    the weights "valid-ema"."""
    loss: Float
    """Mean over tokens, in nats."""
    perplexity: Float
    num_tokens: int
    eval_ms: Float
    consumed_tokens: int
    """Training tokens before the evaluation."""
    tasks: Optional[dict[str, TaskScores]] = None
    """With --eval-tasks, the scores by task; None in tests and without."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            known = ", ".join(f'"{split}"' for split in SPLITS)
            raise DataError(f"an evaluation record has split {self.split!r}; expected one of {known}")


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """A text of `--sample-interval`: the greedy continuation of a prompt by the model after a step."""

    kind: ClassVar[str] = "sample"

    step: int
    prompt: str
    text: str
    """Without the prompt."""
    ended_by: str
    """`length`, `eod` for the end of the document, `non-finite` for logits that name no token."""


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """A single event, such as a checkpoint saved or loaded, or the reason for stopping."""

    kind: ClassVar[str] = "event"

    step: int
    name: str
    """Fixed text, such as "checkpoint saved"."""
    detail: str = ""
    at: str = field(default_factory=utc_now)


@dataclass(frozen=True, kw_only=True)
class TensorStats:
    """Quantization statistics of one tensor over all ranks. Non-finite values are counted, and ignored otherwise.

    A statistic that cannot be measured is None: errors of weights that are kept as codes, staleness without delayed
    scaling.
    """

    format: str
    num_values: int
    """Number of values; if ranks have copies, every copy counts."""
    num_non_finite: int
    amax: Float
    quant_scale_min: Optional[Float] = None
    """Over the quantization scales of blocks that are not all zero."""
    quant_scale_max: Optional[Float] = None
    scale_spread_octaves: Optional[Float] = None
    """log2(quant_scale_max / quant_scale_min)."""
    underflow_fraction: Optional[Float] = None
    """Of the nonzero values, those that became zero."""
    saturated_fraction: Optional[Float] = None
    """Of all values, those beyond the largest number that their scale expresses."""
    sqnr_db: Optional[Float] = None
    """10 log10(sum x^2 / sum (x - x')^2); infinity without any error, None if all values are zero."""
    mean_local_sqnr_db: Optional[Float] = None
    """Mean SQNR over runs of 32 neighbours in a row that are not all zero, each clamped to 0 to 60 dB."""
    staleness_octaves: Optional[Float] = None
    """log2(current amax / amax that the delayed scale was made from): above 0 the tensor has outgrown its scale."""
    outlier_octaves: Optional[Float] = None
    """log2(amax of the largest channel / median of the channels' amaxes)."""
    outlier_channel: Optional[int] = None
    exponent_counts: tuple[int, ...] = ()
    """Codes by exponent: zeros, subnormals, then exponent field 1 and up, without infinities and NaNs."""
    update_to_weight: Optional[Float] = None
    """Of a weight: norm of the update over norm of the weight."""
    codes_changed_fraction: Optional[Float] = None
    """Of a weight: codes that the step changed."""


@dataclass(frozen=True, kw_only=True)
class QuantizationRecord:
    """Quantization statistics of one step, over the first microbatch of every rank.

    Tensors are named `layers.3.linear_fc1.input`, with layers counted from 0 over the whole model. `.row` and `.column`
    are appended if the tensor is quantized along both dimensions.
    """

    kind: ClassVar[str] = "quantization"

    step: int
    recipe: str
    """The run's recipe; empty in high precision, where only `what_if` has entries."""
    recipes: dict[str, str] = field(default_factory=dict)
    """Under a precision map, the recipes of linears with another one; `tensorwise/high/high` names one per GEMM."""
    tensors: dict[str, TensorStats]
    what_if: dict[str, dict[str, TensorStats]] = field(default_factory=dict)
    """The same tensors under what-if recipes, by recipe."""
    gradient_signal: Optional[Float] = None
    """Estimate of the squared norm of the expected gradient (of the loss per token), over the tracked weights."""
    gradient_noise: Optional[Float] = None
    """Estimate of the trace of the covariance of one sequence's gradient."""
    gradient_noise_scale: Optional[Float] = None
    """gradient_noise / gradient_signal, in sequences: the "simple noise scale" of arXiv:1812.06162, appendix A.1."""
    gradient_snr: Optional[Float] = None
    """Sequences of the global batch / gradient_noise_scale: squared signal-to-noise ratio of the step's gradient."""
    update_to_weight: Optional[Float] = None
    codes_changed_fraction: Optional[Float] = None


@dataclass(frozen=True, kw_only=True)
class GuardRecord:
    """The statistics of the layers in one step of `--fp8-guard`; a skipped step has its own, too."""

    kind: ClassVar[str] = "guard"

    step: int
    statistics: dict[str, dict[str, Float]]
    """By statistic, and by layer or input: `layers.3`, `layers.3.linear_fc1.input`. The largest value over all ranks,
    with 6 digits. What was not taken is omitted; NaN counts as infinity."""


def linear_of(tensor: str) -> str:
    """Name of a tensor's linear: `layers.3.linear_fc1` for `layers.3.linear_fc1.input.row`."""
    return re.split(r"\.(?:input|weight|grad_output)\b", tensor)[0]


class TornLineError(DataError):
    """A line that is not JSON, such as the partial line of a killed run."""


Record = Union[
    RunRecord, StepRecord, QuantizationRecord, GuardRecord, EvalRecord, SampleRecord, EventRecord, ExpertRecord
]
RECORD_TYPES: Mapping[str, type] = {cls.kind: cls for cls in typing.get_args(Record)}


def to_json(record: Record) -> str:
    """One line of strict JSON in ASCII, without the line feed, `kind` first."""
    content = {"kind": record.kind} | {name: _encode(value) for name, value in vars(record).items()}
    return json.dumps(content, allow_nan=False)


def from_json(line: str) -> Record:
    """Parse a line that `to_json` wrote.

    Raises:
        TornLineError: the line is not JSON.
        DataError: the line is not a JSON object, or its kind or a field is unknown, missing or of a wrong type.
    """
    try:
        content = parse_json(line)
    except UnreadableFile as error:
        text = f"not valid JSON ({error.reason.removeprefix('not JSON: ')}): {_shorten(line)}"
        # A killed run leaves a line without its end, which is a syntax error. Other errors are damage.
        is_torn = isinstance(error.__cause__, json.JSONDecodeError)
        raise (TornLineError if is_torn else DataError)(text) from error
    if not isinstance(content, dict):
        raise DataError(f"a record must be a JSON object: {_shorten(line)}")
    kind = content.pop("kind", None)
    if kind not in RECORD_TYPES:
        raise DataError(f"unknown kind of record {kind!r}; expected one of {', '.join(RECORD_TYPES)}: {_shorten(line)}")
    try:
        return from_plain(RECORD_TYPES[kind], content, kind)
    except UnreadableFile as error:
        raise DataError(f"{error.reason}: {_shorten(line)}") from None


def _encode(value: Any) -> Any:
    """What `json` can write. A record of statistics has 10,000 values, so the usual types come first."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):  # fields without a value are omitted
        return {name: _encode(item) for name, item in vars(value).items() if item is not None and item != ()}
    return value


def _shorten(line: str) -> str:
    return line if len(line) <= 120 else line[:117] + "..."
