"""Conversion of a Hugging Face model folder to a checkpoint that a run can start from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from megafp8.checkpoint.convert.families import family_of_hf_config
from megafp8.checkpoint.convert.family import HF_EXPERT_BIAS, HFFamily
from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.checkpoint.convert.origin import Origin, read_generation, read_token_ids
from megafp8.checkpoint.convert.problems import check_problems, format_problems, rule_problems, shape_problems
from megafp8.checkpoint.convert.safetensors_files import (
    SAFETENSORS_DTYPES,
    StoredTensor,
    dequantize_weight,
    read_json,
    scale_block,
    scale_suffixes,
    stored_tensors,
    write_json,
)
from megafp8.checkpoint.convert.tensor_mapping import StackedExperts, TensorMapping
from megafp8.checkpoint.convert.tokenizer import FoundTokenizer, find_tokenizer
from megafp8.checkpoint.standalone import LazyTensor, save_weights
from megafp8.config import dimensions, mixture
from megafp8.config.schema import ModelConfig, RunConfig
from megafp8.config.settings import changed_settings, settings_by_name, with_values
from megafp8.errors import CheckpointError
from megafp8.mcore.overrides import DTYPES
from megafp8.recipes.base import Block
from megafp8.utils.suggestions import download_command

TOKENIZER_FOLDER = "tokenizer"
QUANTIZATION_METHODS = ("fp8", "compressed-tensors")
# Scales of static activation quantization, which training does not use.
ACTIVATION_SCALES = ("input_scale", "activation_scale", "k_scale", "v_scale")
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Import:
    """A planned conversion.

    Attributes:
        config: settings of the checkpoint.
        model_settings: those that describe the model, by name.
        table: the tensors.
        sources: lazy tensors by name in the checkpoint.
        tokenizer: None if the folder has none that megafp8 reads.
        origin: what the checkpoint keeps of the folder.
        notes: for the user.
        reader: loads the weights of `sources`, and records those that are not finite.
    """

    config: RunConfig
    model_settings: dict[str, Any]
    table: list[TensorMapping]
    sources: dict[str, LazyTensor]
    tokenizer: Optional[FoundTokenizer]
    origin: Origin
    notes: list[str]
    reader: WeightReader

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(source.num_bytes for source in self.sources.values())

    @property
    def model_config(self) -> RunConfig:
        """Settings that describe the model, without the tokenizer's."""
        return with_values(RunConfig(), self.model_settings)

    def write(self, folder: Path, final: Path, on_bytes: Callable[[int], Any]) -> RunConfig:
        """Write a run folder: a checkpoint of step 0, the tokenizer, and config.json for `--config`.

        Args:
            final: path that the folder will be renamed to.
            on_bytes: called with the size of each tensor that was made.

        Returns:
            Settings that describe the model, including the tokenizer.

        Raises:
            CheckpointError: it cannot be written, or weights are not finite.
        """
        found = {} if self.tokenizer is None else self.tokenizer.copy(
            folder / TOKENIZER_FOLDER, final.absolute() / TOKENIZER_FOLDER
        )  # fmt: skip
        tokenizer_settings = {f"data.{field}": value for field, value in found.items()}
        save_weights(folder, with_values(self.config, tokenizer_settings), self.sources, self.origin.text(), on_bytes)
        self.reader.check_finite()
        model_config = with_values(self.model_config, tokenizer_settings)
        write_json(folder / "config.json", changed_settings(model_config))
        return model_config


def plan_import(
    folder: Path,
    dtype: Optional[str] = None,
    vocab_multiple: Optional[int] = None,
    drops_prediction_layers: bool = False,
) -> Import:
    """Check everything before anything is written.

    Args:
        folder: with config.json and safetensors files.
        dtype: `bf16` or `fp32`; None is the dtype of the largest tensor that is not FP8.
        vocab_multiple: `--make-vocab-size-divisible-by`; None is its default.
        drops_prediction_layers: leave out layers of multi-token prediction, which are a problem otherwise.

    Raises:
        CheckpointError: it is not such a folder, or the model is not supported; with all problems.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: there is no such folder. A model of the Hugging Face hub is fetched first: "
            f"{download_command(str(folder))}"
        )
    fields = read_json(folder / "config.json")
    family = family_of_hf_config(fields)
    hf_config = HFConfig(fields)
    model_settings = family.from_hf_config(hf_config) | {"model.vocab_size": hf_config.positive_int("vocab_size")}
    if vocab_multiple is not None:
        model_settings["model.make_vocab_size_divisible_by"] = vocab_multiple
    check_quantization(hf_config)
    token_ids = read_token_ids(hf_config)
    check_problems(folder, hf_config.problems + size_problems(model_settings))
    tensors = stored_tensors(folder)
    stored = hf_weights(folder, tensors, family)
    extra = prediction_weights(stored, family, model_settings["model.num_layers"])
    check_problems(folder, prediction_problems(extra, drops_prediction_layers))
    stored = {name: tensor for name, tensor in stored.items() if name not in extra}
    dtype, notes = choose_dtype(stored, dtype)
    model_settings |= {f"precision.{dtype}": True} if dtype != "fp32" else {}
    seq_length = model_settings.pop("data.seq_length")
    config = with_values(RunConfig(), model_settings | {
        "data.seq_length": seq_length, "checkpoint.no_save_optim": True, "checkpoint.no_save_rng": True,
    })  # fmt: skip
    check_problems(folder, count_problems(config.model, len(tensors), family.has_stacked_experts(stored)))
    num_tokens = model_settings["model.vocab_size"]
    num_rows = dimensions.padded_vocab_size(config, num_tokens)
    table = family.tensor_table(config.model, num_tokens, num_rows, family.has_stacked_experts(stored))
    reader = WeightReader(folder, stored, hf_config.section("quantization_config").fields.get("weight_block_size"))
    check_problems(folder, hf_config.problems + reader.problems + tensor_problems(table, stored, family, config.model))
    # Rules list the linears of all experts, so the sizes are checked first.
    check_problems(folder, [f"config.json: {problem}" for problem in rule_problems(config)])
    check_problems(folder, tied_output_problems(reader, table[0].hf_names[0], family.output_weight, config.model))
    sources = {row.name: lazy_tensor(row, reader, DTYPES[dtype]) for row in table}
    tokenizer = find_tokenizer(folder)
    eod = None if tokenizer is None else tokenizer.tokenizer.eod
    origin = Origin(family.model_type, num_tokens, token_ids, read_generation(folder), eod)
    if extra:
        notes.append(f"{len(extra)} tensors of multi-token prediction are left out ({extra[0]})")
    notes += reader.notes + import_notes(table, tokenizer, num_tokens)
    if fields.get("auto_map"):
        notes.append(f"the code that config.json names (auto_map) is not read; transformers has {family.architecture}")
    return Import(config, model_settings, table, sources, tokenizer, origin, notes, reader)


def size_problems(model_settings: Mapping[str, Any]) -> list[str]:
    """Return settings with values that are too large, as text."""
    settings = settings_by_name()
    found = {name: settings[name].problem(value) for name, value in model_settings.items()}
    return [
        f"config.json: {settings[name].flags[0]} {model_settings[name]} {problem}"
        for name, problem in found.items()
        if problem
    ]


def count_problems(model: ModelConfig, found: int, is_stacked: bool) -> list[str]:
    """Return a problem if config.json describes more tensors than are found, before they are listed."""
    per_layer = 1 if is_stacked else model.num_experts or 1
    count = sum(per_layer if has_experts else 1 for has_experts in mixture.expert_layers(model))
    return [f"the files have {found:,} tensors, and by config.json at least {count:,}"] if count > found else []


def hf_weights(folder: Path, tensors: Mapping[str, StoredTensor], family: HFFamily) -> dict[str, StoredTensor]:
    """Return the weights by complete name. Models saved without their head omit the prefix.

    Raises:
        CheckpointError: a tensor that is not a buffer of the family has a dtype that weights do not have.
    """
    is_bare = not any(name.startswith(family.prefix) for name in tensors)
    named = {
        (family.prefix + name if is_bare and name != family.output_weight else name): tensor
        for name, tensor in tensors.items()
    }
    weights = {name: tensor for name, tensor in named.items() if not family.buffers.fullmatch(name)}
    known = SAFETENSORS_DTYPES.values()
    check_problems(folder, [
        f"{name} is {str(tensor.dtype).removeprefix('torch.')}; weights are {', '.join(SAFETENSORS_DTYPES)}"
        for name, tensor in weights.items() if tensor.dtype not in known
    ])  # fmt: skip
    return weights


def prediction_weights(stored: Mapping[str, StoredTensor], family: HFFamily, num_layers: int) -> list[str]:
    """Return the names of tensors of multi-token prediction, which are layers after the last one, and not converted."""
    if not family.has_prediction_layers:
        return []
    layer = re.compile(re.escape(family.prefix) + r"layers\.(\d+)\.")
    found = {name: layer.match(name) for name in stored}
    return sorted(name for name, each in found.items() if each is not None and int(each[1]) >= num_layers)


def prediction_problems(names: list[str], drops_prediction_layers: bool) -> list[str]:
    """Return a problem unless layers of multi-token prediction are there and dropped, or neither."""
    if names and not drops_prediction_layers:
        return [
            f"num_nextn_predict_layers: {len(names)} tensors of multi-token prediction ({names[0]}), which are "
            "not converted; --drop-mtp-layers leaves them out"
        ]
    if drops_prediction_layers and not names:
        return ["--drop-mtp-layers: there are no layers of multi-token prediction; remove it"]
    return []


def tensor_problems(
    table: list[TensorMapping], stored: Mapping[str, StoredTensor], family: HFFamily, model: ModelConfig
) -> list[str]:
    """Return how the files differ from what config.json describes."""
    expected = {name: shape for row in table for name, shape in row.hf_shapes().items()}
    optional = {family.output_weight} if model.share_embeddings_and_output_weights else set()
    found = {
        name: tensor.shape
        for name, tensor in stored.items()
        if name in expected or not (name in optional or is_scale(name))
    }
    kind = f"a {family.architecture} as config.json describes it"
    return shape_problems(expected, found, " and by config.json", kind)


def is_scale(name: str) -> bool:
    """Return whether a tensor is a scale of FP8 weights or activations."""
    return name.endswith((*scale_suffixes(), *ACTIVATION_SCALES))


def tied_output_problems(reader: WeightReader, embedding: str, output: str, model: ModelConfig) -> list[str]:
    """Return a problem if tied embeddings are stored twice and differ.

    Args:
        embedding: name of its weight.
        output: name of the output layer's weight.
    """
    if not model.share_embeddings_and_output_weights or output not in reader.stored:
        return []
    if torch.equal(reader.stored[output].load(), reader.stored[embedding].load()):
        return []
    return [f"{output} differs from the embedding, although config.json has tie_word_embeddings true"]


def check_quantization(hf_config: HFConfig) -> None:
    """Add problems for a quantization other than FP8 with scales."""
    if hf_config.fields.get("quantization_config") is None:
        return
    quantization = hf_config.section("quantization_config")
    quantization.require("quant_method", *QUANTIZATION_METHODS, default=None)
    if quantization.fields.get("quant_method") == "compressed-tensors":
        quantization.require("format", "float-quantized", default=None)


def choose_dtype(stored: Mapping[str, StoredTensor], requested: Optional[str]) -> tuple[str, list[str]]:
    """Return the name of the weights' dtype in the checkpoint, and notes."""
    weights = [tensor for name, tensor in stored.items() if not is_scale(name) and not name.endswith(HF_EXPERT_BIAS)]
    is_quantized = any(tensor.dtype == torch.float8_e4m3fn for tensor in weights)
    largest = max(
        (tensor for tensor in weights if tensor.dtype != torch.float8_e4m3fn),
        key=lambda tensor: math.prod(tensor.shape), default=None,
    )  # fmt: skip
    dtype = requested or ("bf16" if largest is None else DTYPE_NAMES[largest.dtype])
    width = torch.finfo(DTYPES[dtype]).bits
    rounded = [
        tensor for tensor in weights
        if tensor.dtype != torch.float8_e4m3fn and tensor.dtype != DTYPES[dtype]
        and torch.finfo(tensor.dtype).bits >= width
    ]  # fmt: skip
    notes = [f"{len(rounded)} tensors of another type are rounded to {dtype}"] if rounded else []
    if is_quantized:
        notes.append(f"FP8 weights are multiplied by their scales in FP32 and rounded to {dtype}")
    return dtype, notes


class WeightReader:
    """Loads weights by complete name, and dequantizes FP8 weights.

    Attributes:
        problems: with scales.
        not_finite: loaded weights with NaN or infinite values, with their number.
        notes: for the user.
    """

    def __init__(self, folder: Path, stored: Mapping[str, StoredTensor], block_size: Any):
        self.folder, self.stored = folder, stored
        self.problems: list[str] = []
        self.not_finite: list[str] = []
        self._scales: dict[str, tuple[str, Optional[Block]]] = {}
        used = set()
        for name, tensor in stored.items():
            if tensor.dtype == torch.float8_e4m3fn:
                used.add(self._find_scale(name, tensor, block_size))
        unused = [name for name in stored if is_scale(name) and name not in used]
        self.problems += [f"{name} belongs to no FP8 weight" for name in unused if not name.endswith(ACTIVATION_SCALES)]
        left_out = [name for name in unused if name.endswith(ACTIVATION_SCALES)]
        self.notes = [f"{len(left_out)} scales of activations are left out ({left_out[0]})"] if left_out else []

    def _find_scale(self, name: str, tensor: StoredTensor, block_size: Any) -> Optional[str]:
        prefix = name.removesuffix("weight")
        scale = next((prefix + suffix for suffix in scale_suffixes() if prefix + suffix in self.stored), None)
        if scale is None:
            self.problems.append(f"{name} is FP8 and has no scale beside it")
            return None
        block = scale_block(tensor.shape, self.stored[scale].shape, block_size)
        if isinstance(block, str):
            self.problems.append(f"{name}: {block}")
        else:
            self._scales[name] = scale, block
        return scale

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """Load a weight in a given dtype."""
        if name in self._scales:
            scale, block = self._scales[name]
            weight = dequantize_weight(self.stored[name].load(), self.stored[scale].load(), block, dtype)
        else:
            weight = self.stored[name].load().to(dtype)
        if not all(extreme.isfinite() for extreme in weight.aminmax()):  # NaN is an extreme, too
            self.not_finite.append(f"{name}: {non_finite_summary(weight)}")
        return weight

    def check_finite(self) -> None:
        """Raise if a loaded weight is not finite: the first loss would be NaN.

        Raises:
            CheckpointError: with all such weights.
        """
        if self.not_finite:
            raise CheckpointError(
                f"{self.folder} holds numbers that are not finite, with which no run can start; fetch the "
                f"model again, or take another one:\n{format_problems(sorted(self.not_finite))}"
            )


def non_finite_summary(weight: Tensor) -> str:
    """Return the number of NaN and infinite values: `3 NaN and 1 infinite of 6144 in bf16`."""
    counts = {"NaN": int(weight.isnan().sum()), "infinite": int(weight.isinf().sum())}
    found = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return f"{found} of {weight.numel()} in {DTYPE_NAMES[weight.dtype]}"


def lazy_tensor(row: TensorMapping, reader: WeightReader, dtype: torch.dtype) -> LazyTensor:
    """Return a lazy tensor of the checkpoint that is joined from the Hugging Face tensors.

    Args:
        dtype: of the weights.
    """
    dtype = row.dtype or dtype

    def make() -> Tensor:
        parts = (reader.load(name, dtype) for name in row.hf_names)
        if isinstance(row.layout, StackedExperts):
            return row.layout.join(parts)
        return row.layout.join(list(parts)).contiguous()

    return LazyTensor(row.shape, dtype, make)


def import_notes(table: list[TensorMapping], tokenizer: Optional[FoundTokenizer], num_tokens: int) -> list[str]:
    """Return what differs from the Hugging Face model, as text."""
    num_padding = table[0].shape[0] - num_tokens
    notes = [f"{num_padding} padding rows are added to the vocabulary, the mean of all others"] if num_padding else []
    if tokenizer is None:
        notes.append("the folder has no tokenizer that megafp8 reads: give --tokenizer-type and its files")
    elif tokenizer.tokenizer.vocab_size > num_tokens:
        notes.append(f"the tokenizer has {tokenizer.tokenizer.vocab_size} ids and the model {num_tokens} tokens")
    return notes
