"""The records of a run: one JSON object a line, in one file, which every report is made from.

Five kinds, told apart by the field `kind`: `run` opens the file and every resumption, `step` follows each optimizer
step, `quantization` the steps at which quantization is looked at, `eval` each validation or test, `event` whatever else
happened (checkpoint saved, finding on the run's health, reason for stopping).

The lines are strict JSON. JSON has no NaN and no infinity, and a loss that became one is just what a reader looks
for, so the three values are written as the texts "nan", "inf" and "-inf" and read back as numbers wherever the
schema below declares a number. Inside `config`, which has no schema here, they stay texts."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional, Union

from megafp8.errors import DataError
from megafp8.utils.files import UnreadableFile
from megafp8.utils.formatting import utc_now
from megafp8.utils.strict_json import parse_json

RECORDS_FILE = "records.jsonl"
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The start of a run, or of its continuation.

    Step and evaluation records that come before this one in the file and lie after `resumed_from_step` no longer
    count: the run went back and did those steps again.
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
    """The arithmetic of the linears in a few words, for tables and legends: "bf16", "fp8 hybrid tensorwise (TE)"."""
    device_name: str
    num_threads: Optional[int] = None
    """CPU threads of each rank. On a CPU another number gives other last bits."""
    precision_map: dict[str, str] = field(default_factory=dict)
    """Under a precision map, the resolved recipes by linear and layers; empty where all have one."""
    peak_flops: Optional[dict[str, float]] = None
    """Dense peak FLOP/s of one device by dtype; None for a device that is not in the table."""
    peak_source: Optional[str] = None
    mfu_dtype: Optional[str] = None
    """The dtype whose peak is the denominator of `StepRecord.mfu_fraction`."""
    num_parameters: Optional[int] = None
    flops_per_token: Optional[float] = None
    """Model FLOPs of one token, forward and backward."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of megafp8, Python and the libraries that do the arithmetic."""
    resumed_from_step: Optional[int] = None
    """Last step of the checkpoint that was loaded; None for a run that starts at step 0."""
    started_at: str = field(default_factory=utc_now)
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step. Rates count the whole job unless the name says `per_device`."""

    kind: ClassVar[str] = "step"

    step: int
    """1 for the first step: the number of steps done after this one."""
    consumed_samples: int
    consumed_tokens: int
    loss: float
    """Mean over the tokens of the global batch, in nats."""
    learning_rate: float
    step_ms: float
    tokens_per_second: float
    grad_norm: Optional[float] = None
    """Global norm before clipping."""
    model_tflops_per_device: Optional[float] = None
    mfu_fraction: Optional[float] = None
    """Model FLOP/s over the peak that the run record names; None where the peak is not known."""
    loss_scale: Optional[float] = None
    """What the loss of this step was multiplied by; None without a loss scale."""
    num_zeros_in_grad: Optional[int] = None
    params_norm: Optional[float] = None
    memory_peak_bytes: Optional[int] = None
    """Largest memory held so far by any device of the job."""
    param_gather_bytes: Optional[int] = None
    """What rank 0 got from others of the distributed optimizer's updated weights, with scales and padding. With
    overlapped gathers these are the weights that the step before updated, and with a graph they are not counted."""
    is_skipped: bool = False
    """The weights were left as they were: an event says why, or gradients overflowed at the loss scale."""
    timers_ms: Optional[dict[str, float]] = None
    """Parts of the step's time, by name."""


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One pass over held-out data."""

    kind: ClassVar[str] = "eval"

    step: int
    split: str
    """"valid" or "test"."""
    loss: float
    """Mean over tokens, in nats."""
    perplexity: float
    num_tokens: int
    eval_ms: float
    consumed_tokens: int
    """Training tokens seen when it was made."""

    def __post_init__(self) -> None:
        if self.split not in ("valid", "test"):
            raise DataError(f'an evaluation record has split {self.split!r}; known are "valid" and "test"')


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """Something that happened once: a checkpoint saved or loaded, the reason for stopping."""

    kind: ClassVar[str] = "event"

    step: int
    name: str
    """A few fixed words, such as "checkpoint saved"."""
    detail: str = ""
    at: str = field(default_factory=utc_now)


@dataclass(frozen=True, kw_only=True)
class TensorStats:
    """What quantization did to one tensor, over all ranks. Values that are not finite are counted, and left out else.

    A number that cannot be known is None: errors of weights that are kept as codes, staleness without delayed scaling.
    """

    format: str
    num_values: int
    """Values looked at; where ranks have copies, every copy counts."""
    num_non_finite: int
    amax: float
    quant_scale_min: Optional[float] = None
    """Of the scales that multiply into the format, those of values that are not all zero."""
    quant_scale_max: Optional[float] = None
    scale_spread_octaves: Optional[float] = None
    """log2(quant_scale_max / quant_scale_min)."""
    underflow_fraction: Optional[float] = None
    """Became zero, of the values that are not zero."""
    saturated_fraction: Optional[float] = None
    """Lie beyond the largest number that their scale expresses, of all values."""
    sqnr_db: Optional[float] = None
    """10 log10(sum x^2 / sum (x - x')^2); infinity without any error, None if all values are zero."""
    mean_local_sqnr_db: Optional[float] = None
    """Mean of the same over runs of 32 neighbours in a row that are not all zero, each limited to 0 to 60 dB."""
    staleness_octaves: Optional[float] = None
    """log2(amax now / the amax that the scale was made from): above 0 the tensor has outgrown its scale."""
    outlier_octaves: Optional[float] = None
    """log2(amax of the largest channel / median of the channels' amaxes)."""
    outlier_channel: Optional[int] = None
    exponent_counts: tuple[int, ...] = ()
    """Codes by exponent: zeros, subnormals, then exponent field 1 and up; infinities and NaNs not counted."""
    update_to_weight: Optional[float] = None
    """Of a weight: norm of the step's update to the norm of the weight."""
    codes_changed_fraction: Optional[float] = None
    """Of a weight: codes that are others after the step than before."""


@dataclass(frozen=True, kw_only=True)
class QuantizationRecord:
    """A look at the operands of the quantized linears in one step: each tensor in the first microbatch of every rank.

    Tensors are named `layers.3.linear_fc1.input`, layers counted from 0 over the whole model; `.row` and `.column` are
    added where the blocks of the two uses lie along different dimensions.
    """

    kind: ClassVar[str] = "quantization"

    step: int
    recipe: str
    """Of the run's linears; empty in high precision, where only `what_if` has entries."""
    recipes: dict[str, str] = field(default_factory=dict)
    """Under a precision map, of the linears that have another one: `tensorwise/high/high` is one a GEMM."""
    tensors: dict[str, TensorStats]
    what_if: dict[str, dict[str, TensorStats]] = field(default_factory=dict)
    """The same tensors under other recipes, by recipe."""
    gradient_signal: Optional[float] = None
    """Estimate of the squared norm of the expected gradient (of the loss per token), over the weights looked at."""
    gradient_noise: Optional[float] = None
    """Estimate of the trace of the covariance of one sequence's gradient."""
    gradient_noise_scale: Optional[float] = None
    """gradient_noise / gradient_signal, in sequences: the "simple noise scale" of arXiv:1812.06162, appendix A.1."""
    gradient_snr: Optional[float] = None
    """Sequences of the global batch / gradient_noise_scale: squared signal to noise of the step's gradient."""
    update_to_weight: Optional[float] = None
    codes_changed_fraction: Optional[float] = None


class TornLineError(DataError):
    """A line that is not JSON at all, such as half a line that a killed run left."""


Record = Union[RunRecord, StepRecord, QuantizationRecord, EvalRecord, EventRecord]
RECORD_TYPES: Mapping[str, type] = {
    cls.kind: cls for cls in (RunRecord, StepRecord, QuantizationRecord, EvalRecord, EventRecord)
}
NON_FINITE = ("nan", "inf", "-inf")


def to_json(record: Record) -> str:
    """One line of strict JSON without the line feed, in ASCII, `kind` first."""
    content = {"kind": record.kind} | {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return json.dumps(_encode(content), allow_nan=False)


def from_json(line: str) -> Record:
    """The record in a line that `to_json` made.

    Raises:
        TornLineError: the line is not JSON.
        DataError: the line is not a JSON object, its kind is unknown, a field is unknown or missing or has another
            type than the schema says.
    """
    try:
        content = parse_json(line)
    except UnreadableFile as error:
        text = f"not a line of JSON ({error.reason.removeprefix('not JSON: ')}): {_shorten(line)}"
        # A kill leaves a line without an end, which is an error of syntax; nothing else is excused.
        is_torn = isinstance(error.__cause__, json.JSONDecodeError)
        raise (TornLineError if is_torn else DataError)(text) from error
    if not isinstance(content, dict):
        raise DataError(f"a record is a JSON object, this is not one: {_shorten(line)}")
    kind = content.pop("kind", None)
    if kind not in RECORD_TYPES:
        raise DataError(f"unknown kind of record {kind!r}; known are {', '.join(RECORD_TYPES)}: {_shorten(line)}")
    return _build(RECORD_TYPES[kind], content, kind, f"a {kind} record", line)


def _build(cls: type, content: Mapping[str, Any], where: str, name: str, line: str) -> Any:
    """An object of a dataclass from its fields.

    Args:
        where: its place, in front of the names of fields.
        name: what to call it.
    """
    types = _field_types(cls)
    unknown = sorted(set(content) - set(types))
    if unknown:
        raise DataError(f"{name} has unknown fields {', '.join(unknown)}; was it written by a newer megafp8?")
    missing = [name for name in _required_fields(cls) if name not in content]
    if missing:
        raise DataError(f"{name} lacks {', '.join(missing)}: {_shorten(line)}")
    return cls(**{field: _decode(value, types[field], f"{where}.{field}") for field, value in content.items()})


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):  # what is not there takes no room
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {name: _encode(item) for name, item in fields.items() if item is not None and item != ()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any, expected: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is Union:
        return None if value is None else _decode(value, arguments[0], where)
    if origin is dict and isinstance(value, dict):
        return {key: _decode(item, arguments[1], f"{where}[{key!r}]") for key, item in value.items()}
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(item, arguments[0], f"{where}[]") for item in value)
    if dataclasses.is_dataclass(expected) and isinstance(value, dict):
        return _build(expected, value, where, where, str(value))
    if expected is Any:
        return value
    if expected is float and (type(value) in (int, float) or (isinstance(value, str) and value in NON_FINITE)):
        return float(value)
    if expected in (int, str, bool) and type(value) is expected:
        return value
    name = getattr(origin or expected, "__name__", str(expected))
    raise DataError(f"{where} should be of type {name} and is {value!r}")


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _required_fields(cls: type) -> list[str]:
    return [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]


def _shorten(line: str) -> str:
    return line if len(line) <= 120 else line[:117] + "..."
