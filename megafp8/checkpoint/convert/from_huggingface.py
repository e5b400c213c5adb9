"""The folder of a transformers model as a checkpoint from which a run can start."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from megafp8.checkpoint.convert.families import family_of_theirs
from megafp8.checkpoint.convert.safetensors_files import (
    TheirFiles,
    TheirTensor,
    block_of,
    dequantized,
    read_json,
    scale_suffixes,
    write_json,
)
from megafp8.checkpoint.convert.tensor_mapping import Family, TensorMapping, TheirConfig
from megafp8.checkpoint.convert.tokenizer import FoundTokenizer, find_tokenizer
from megafp8.checkpoint.standalone import LazyTensor, save_weights
from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.config.settings import all_settings, settings_by_name, to_dict, value_of, with_values
from megafp8.errors import CheckpointError
from megafp8.mcore.overrides import DTYPES
from megafp8.recipes.base import Block

TOKENIZER_FOLDER = "tokenizer"
QUANTIZATION_METHODS = ("fp8", "compressed-tensors")
# Of activations, with which this engine would not know what to do.
FOREIGN_SCALES = ("input_scale", "activation_scale", "k_scale", "v_scale")
SHOWN = 12
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Import:
    """A conversion that is about to be made.

    Attributes:
        config: the settings of the checkpoint.
        given: those that describe the model, by name.
        table: its tensors.
        sources: how each is made, by our name.
        tokenizer: None where the folder has none that megafp8 reads.
        notes: what a person should know, in words.
        reader: gives `sources` their weights, and finds what is not finite in them.
    """

    config: RunConfig
    given: dict[str, Any]
    table: list[TensorMapping]
    sources: dict[str, LazyTensor]
    tokenizer: Optional[FoundTokenizer]
    notes: list[str]
    reader: Reader

    @property
    def num_bytes(self) -> int:
        """Of all tensors here."""
        return sum(source.num_bytes for source in self.sources.values())

    @property
    def described(self) -> RunConfig:
        """The settings that describe the model, without the tokenizer's."""
        return with_values(RunConfig(), self.given)

    def write(self, folder: Path, final: Path, on_bytes: Callable[[int], Any]) -> RunConfig:
        """Fill a folder as a run's: a checkpoint of step 0, the tokenizer, and config.json for `--config`.

        Args:
            final: what the folder will be called.
            on_bytes: told of bytes that were made.

        Returns:
            the settings that describe the model, tokenizer included.

        Raises:
            CheckpointError: it cannot be written, or weights are not finite; all of them, with how many numbers.
        """
        found = {} if self.tokenizer is None else self.tokenizer.copy(
            folder / TOKENIZER_FOLDER, final.absolute() / TOKENIZER_FOLDER
        )  # fmt: skip
        of_tokenizer = {f"data.{field}": value for field, value in found.items()}
        save_weights(folder, with_values(self.config, of_tokenizer), counted(self.sources, on_bytes))
        self.reader.check_finite()
        described = with_values(self.described, of_tokenizer)
        write_json(folder / "config.json", changed_settings(described))
        return described


def plan_import(folder: Path, dtype: Optional[str] = None, vocab_multiple: Optional[int] = None) -> Import:
    """Look at everything that could be wrong before anything is written.

    Args:
        folder: with config.json and safetensors.
        dtype: `bf16` or `fp32`; None is as stored, or as config.json says where that is FP8.
        vocab_multiple: `--make-vocab-size-divisible-by`; None is its default.

    Raises:
        CheckpointError: it is no such folder, or not a model that can be expressed here; all problems at once.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: there is no such folder. A model of the Hugging Face hub is fetched first: "
            f"hf download {folder} --local-dir FOLDER"
        )
    fields = read_json(folder / "config.json")
    family = family_of_theirs(fields)
    theirs = TheirConfig(fields)
    given = family.from_theirs(theirs) | {"model.vocab_size": theirs.whole("vocab_size")}
    if vocab_multiple is not None:
        given["model.make_vocab_size_divisible_by"] = vocab_multiple
    check_quantization(theirs)
    refuse(folder, theirs.problems + size_problems(given))
    files = TheirFiles(folder)
    stored = weights_of(files, family)
    dtype, notes = chosen_dtype(stored, theirs, dtype)
    given |= {f"precision.{dtype}": True} if dtype != "fp32" else {}
    seq_length = given.pop("data.seq_length")
    config = with_values(RunConfig(), given | {
        "data.seq_length": seq_length, "checkpoint.no_save_optim": True, "checkpoint.no_save_rng": True,
    })  # fmt: skip
    num_tokens = given["model.vocab_size"]
    table = family.rows(config.model, num_tokens, derived.padded_vocab_size(config, num_tokens))
    reader = Reader(files, stored, theirs.part("quantization_config").fields.get("weight_block_size"))
    refuse(folder, theirs.problems + reader.problems + other_tensors(table, stored, family, config))
    refuse(folder, other_output_layer(reader, table, family, config))
    sources = {row.ours: source_of(row, reader, DTYPES[dtype]) for row in table}
    tokenizer = find_tokenizer(folder)
    notes += reader.notes + notes_on(table, tokenizer, num_tokens)
    return Import(config, given, table, sources, tokenizer, notes, reader)


def size_problems(given: Mapping[str, Any]) -> list[str]:
    """Settings that are too large to compute with, by name."""
    settings = settings_by_name()
    faults = {name: settings[name].fault(value) for name, value in given.items()}
    return [f"config.json: {settings[name].flags[0]} {given[name]} {fault}" for name, fault in faults.items() if fault]


def refuse(folder: Path, problems: list[str]) -> None:
    """Raise if there are problems.

    Raises:
        CheckpointError: all of them.
    """
    if problems:
        raise CheckpointError(f"{folder} cannot be expressed here:\n{listed(problems)}")


def listed(problems: list[str]) -> str:
    """The first problems, a line each, and how many more there are."""
    shown = problems[:SHOWN] + ([f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else [])
    return "\n".join(f"  {problem}" for problem in shown)


# --- what the files hold ----------------------------------------------------------------------------------------------


def weights_of(files: TheirFiles, family: Family) -> dict[str, tuple[str, TheirTensor]]:
    """Their tensors by whole name, each with its name in the file, where a model without its head has no prefix."""
    is_bare = not any(name.startswith(family.prefix) for name in files.tensors)
    named = {
        (family.prefix + name if is_bare and not name.startswith("lm_head.") else name): (name, tensor)
        for name, tensor in files.tensors.items()
    }
    return {name: each for name, each in named.items() if not family.buffers.fullmatch(name)}


def other_tensors(
    table: list[TensorMapping], stored: Mapping[str, tuple[str, TheirTensor]], family: Family, config: RunConfig
) -> list[str]:
    """How the files differ from what config.json says is in them."""
    expected = {name: shape for row in table for name, shape in row.their_shapes().items()}
    optional = {"lm_head.weight"} if config.model.share_embeddings_and_output_weights else set()
    problems = [f"{name} is missing" for name in expected if name not in stored]
    for name, (_, tensor) in stored.items():
        if name in expected and tensor.shape != expected[name]:
            problems.append(f"{name} has shape {tensor.shape} and by config.json {expected[name]}")
        elif name not in expected and not (name in optional or is_scale(name)):
            problems.append(f"{name} is not part of a {family.architecture} as config.json describes it")
    return problems


def is_scale(name: str) -> bool:
    """Whether it belongs to FP8 weights."""
    return name.endswith((*scale_suffixes(), *FOREIGN_SCALES))


def other_output_layer(reader: Reader, table: list[TensorMapping], family: Family, config: RunConfig) -> list[str]:
    """Tied embeddings may be stored twice, and then have to be equal."""
    is_tied = config.model.share_embeddings_and_output_weights
    if not is_tied or "lm_head.weight" not in reader.stored:
        return []
    if torch.equal(reader.load_stored("lm_head.weight"), reader.load_stored(table[0].theirs[0])):
        return []
    return ["lm_head.weight differs from the embedding, although config.json has tie_word_embeddings true"]


def check_quantization(theirs: TheirConfig) -> None:
    """Note a quantization that is not FP8 with scales."""
    if theirs.fields.get("quantization_config") is None:
        return
    quantization = theirs.part("quantization_config")
    quantization.demand("quant_method", *QUANTIZATION_METHODS, default=None)
    if quantization.fields.get("quant_method") == "compressed-tensors":
        quantization.demand("format", "float-quantized", default=None)


def chosen_dtype(
    stored: Mapping[str, tuple[str, TheirTensor]], theirs: TheirConfig, asked: Optional[str]
) -> tuple[str, list[str]]:
    """The type that weights will have here, by its name, and what a person should know."""
    weights = [tensor for name, (_, tensor) in stored.items() if not is_scale(name)]
    is_quantized = any(tensor.dtype == torch.float8_e4m3fn for tensor in weights)
    largest = max(
        (tensor for tensor in weights if tensor.dtype != torch.float8_e4m3fn),
        key=lambda tensor: math.prod(tensor.shape), default=None,
    )  # fmt: skip
    dtype = asked or ("bf16" if largest is None else DTYPE_NAMES[largest.dtype])
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


class Reader:
    """Reads weights by their whole names, FP8 ones as what they stand for.

    Attributes:
        problems: what is wrong with scales.
        not_finite: weights with NaN or infinite numbers among those loaded so far, with how many.
        notes: what a person should know.
    """

    def __init__(self, files: TheirFiles, stored: Mapping[str, tuple[str, TheirTensor]], block_size: Any):
        self.files, self.stored = files, stored
        self.problems: list[str] = []
        self.not_finite: list[str] = []
        self._scales: dict[str, tuple[str, Optional[Block]]] = {}
        used = set()
        for name, (_, tensor) in stored.items():
            if tensor.dtype == torch.float8_e4m3fn:
                used.add(self._find_scale(name, tensor, block_size))
        unused = [name for name in stored if is_scale(name) and name not in used]
        self.problems += [f"{name} belongs to no FP8 weight" for name in unused if not name.endswith(FOREIGN_SCALES)]
        foreign = [name for name in unused if name.endswith(FOREIGN_SCALES)]
        self.notes = [f"{len(foreign)} scales of activations are left out ({foreign[0]})"] if foreign else []

    def _find_scale(self, name: str, tensor: TheirTensor, block_size: Any) -> Optional[str]:
        stem = name.removesuffix("weight")
        scale = next((stem + each for each in scale_suffixes() if stem + each in self.stored), None)
        if scale is None:
            self.problems.append(f"{name} is FP8 and has no scale beside it")
            return None
        block = block_of(tensor.shape, self.stored[scale][1].shape, block_size)
        if isinstance(block, str):
            self.problems.append(f"{name}: {block}")
        else:
            self._scales[name] = scale, block
        return scale

    def load_stored(self, name: str) -> Tensor:
        """A tensor as it is in the file."""
        return self.files.load(self.stored[name][0])

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """A weight in this type."""
        if name in self._scales:
            scale, block = self._scales[name]
            weight = dequantized(self.load_stored(name), self.load_stored(scale), block, dtype)
        else:
            weight = self.load_stored(name).to(dtype)
        if not weight.isfinite().all():
            self.not_finite.append(f"{name}: {not_finite_text(weight)}")
        return weight

    def check_finite(self) -> None:
        """Refuse what no run can start from: its first loss would be NaN.

        Raises:
            CheckpointError: a weight that was loaded is not finite.
        """
        if self.not_finite:
            raise CheckpointError(
                f"{self.files.folder} holds numbers that are not finite, with which no run can start; fetch the "
                f"model again, or take another one:\n{listed(sorted(self.not_finite))}"
            )


def not_finite_text(weight: Tensor) -> str:
    """How many of its numbers are NaN or infinite: `3 NaN and 1 infinite of 6144 in bf16`."""
    counts = {"NaN": int(weight.isnan().sum()), "infinite": int(weight.isinf().sum())}
    found = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return f"{found} of {weight.numel()} in {DTYPE_NAMES[weight.dtype]}"


# --- what it becomes --------------------------------------------------------------------------------------------------


def source_of(row: TensorMapping, reader: Reader, dtype: torch.dtype) -> LazyTensor:
    """How one tensor of ours is made."""
    return LazyTensor(
        row.shape, dtype, lambda: row.layout.join([reader.load(name, dtype) for name in row.theirs]).contiguous()
    )


def counted(sources: Mapping[str, LazyTensor], on_bytes: Callable[[int], Any]) -> dict[str, LazyTensor]:
    """The same, telling what was made."""

    def told(source: LazyTensor) -> LazyTensor:
        def make() -> Tensor:
            tensor = source.make()
            on_bytes(source.num_bytes)
            return tensor

        return dataclasses.replace(source, make=make)

    return {name: told(source) for name, source in sources.items()}


def notes_on(table: list[TensorMapping], tokenizer: Optional[FoundTokenizer], num_tokens: int) -> list[str]:
    """What is another way here."""
    num_padding = table[0].shape[0] - num_tokens
    notes = [f"{num_padding} padding rows are added to the vocabulary, the mean of all others"] if num_padding else []
    if tokenizer is None:
        notes.append("the folder has no tokenizer that megafp8 reads: give --tokenizer-type and its files")
    elif tokenizer.tokenizer.vocab_size > num_tokens:
        notes.append(f"the tokenizer has {tokenizer.tokenizer.vocab_size} ids and the model {num_tokens} tokens")
    return notes


def changed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that are not the defaults, section by section."""
    tree = to_dict(config)
    changed: dict[str, dict[str, Any]] = {}
    for setting in all_settings():
        if setting.section and value_of(config, setting.name) != setting.default:
            changed.setdefault(setting.section, {})[setting.field] = tree[setting.section][setting.field]
    return changed
