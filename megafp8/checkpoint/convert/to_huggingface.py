"""Conversion of a checkpoint to a Hugging Face model folder."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from megafp8.checkpoint.convert import safetensors_files
from megafp8.checkpoint.convert.families import family_of_model
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.origin import GENERATION_FILE, Origin, origin_of, special_tokens
from megafp8.checkpoint.convert.problems import shape_problems
from megafp8.checkpoint.convert.safetensors_files import TensorBatch, WeightForm, write_batches, write_json
from megafp8.checkpoint.convert.tensor_mapping import TensorMapping
from megafp8.checkpoint.convert.tokenizer import files_to_copy, tokenizer_notes, write_tokenizer
from megafp8.checkpoint.metadata import OPTIMIZER_PREFIX, is_extra_state, load_common_state, load_errors
from megafp8.checkpoint.resume_point import find_source
from megafp8.checkpoint.standalone import CheckpointTensors
from megafp8.checkpoint.state_dict import EMBEDDING
from megafp8.checkpoint.writer import to_cpu
from megafp8.config import derived, dimensions, mixture, multi_token, precision_map
from megafp8.config.schema import DataConfig, ModelConfig, PrecisionConfig, RunConfig
from megafp8.config.settings import from_json, with_values
from megafp8.data.tokenizers.build import Tokenizer, build_trained_tokenizer
from megafp8.errors import CheckpointError
from megafp8.mcore.overrides import DTYPES
from megafp8.recipes import registry

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of a conversion.

    Attributes:
        step: of the checkpoint; None is the newest.
        dtype: `bf16` or `fp32`; None keeps the stored dtype.
        quantizes: export the linears' weights in FP8.
        fp8_recipe: of the export; None is the one closest to the run's.
        tokenizer_files: fields of the data section with the current paths of the tokenizer's files.
        model_type: of the family to write; None is the first that supports the model.
        ignores_overrides: accept a run with `--override transformer.FIELD=VALUE`.
        drops_mtp: leave out the layers of multi-token prediction, which the main output does not need.
    """

    step: Optional[int] = None
    dtype: Optional[str] = None
    quantizes: bool = False
    fp8_recipe: Optional[str] = None
    tokenizer_files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    model_type: Optional[str] = None
    ignores_overrides: bool = False
    drops_mtp: bool = False


@dataclass(frozen=True)
class Export:
    """A planned conversion.

    Attributes:
        path: the checkpoint.
        table: its tensors.
        batches: to write.
        fields: of config.json.
        generation: content of generation_config.json; None writes none.
        tokenizer: None if the run has none.
        notes: for the user.
    """

    path: Path
    config: RunConfig
    table: list[TensorMapping]
    batches: list[TensorBatch]
    fields: dict[str, Any]
    generation: Optional[dict[str, Any]]
    tokenizer: Optional[Tokenizer]
    notes: list[str]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors to write."""
        return sum(piece.num_bytes for piece in self.batches)

    def write(self, folder: Path, max_file_bytes: int, on_bytes: Callable[[int], Any]) -> None:
        """Write the model folder.

        Raises:
            CheckpointError: it cannot be written.
        """
        write_batches(folder, self.batches, max_file_bytes, on_bytes)
        write_json(folder / "config.json", self.fields)
        if self.generation is not None:
            write_json(folder / GENERATION_FILE, self.generation)
        write_tokenizer(self.config.data, folder)


def plan_export(source: Path, options: ExportOptions) -> Export:
    """Check everything before anything is written.

    Args:
        source: folder of a run or of a checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, the model is not supported, or a file of the tokenizer
            is a link to another place.
        DataError: the tokenizer's files are missing.
    """
    path = find_source(source, options.step).path
    common = load_common_state(path)
    saved = from_json(common["config"])
    with load_errors(path):
        origin = origin_of(common)
    depths = multi_token.num_depths(saved.model)
    if depths and not options.drops_mtp:
        raise CheckpointError(
            f"{path} has multi-token prediction (--mtp-num-layers {depths}), which is not converted: "
            "--drop-mtp-layers leaves its layers out; the main output does not use them"
        )
    # The number of positions is explicit, and the tokenizer's files have their current paths.
    config = with_values(saved, {
        "model.max_position_embeddings": saved.model.max_position_embeddings or saved.data.seq_length,
        "model.mtp_num_layers": None, **{f"data.{name}": each for name, each in options.tokenizer_files.items()},
    })  # fmt: skip
    model, precision = config.model, config.precision
    family, problems, notes = choose_family(model, options.model_type, origin)
    if config.overrides and not options.ignores_overrides:
        problems += [
            f"--override {each}: may make it another model; --ignore-overrides if it does not"
            for each in config.overrides if each.startswith("transformer.")
        ]  # fmt: skip
    if options.quantizes and family.has_conv1d:
        problems.append(f"--fp8: those who read FP8 weights know linears, and {family.model_type} has Conv1D")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(f"{path} cannot be expressed as a model of type {family.model_type}:\n{lines}")
    tensors = CheckpointTensors(path)
    has_tokenizer = derived.tokenizer_type(config.data) is not None
    tokenizer = build_trained_tokenizer(config.data, model.vocab_size) if has_tokenizer else None
    files_to_copy(config.data)  # refuses a file here, before the weights are written
    num_tokens, num_rows = num_model_tokens(model, config.data, tokenizer), tensors.locations[EMBEDDING].shape[0]
    if dimensions.padded_vocab_size(config, num_tokens) != num_rows:
        raise CheckpointError(
            f"the embedding in {path} has {num_rows} rows, which are no {num_tokens} tokens and their padding: "
            "--tokenizer-model names the tokenizer that it was trained with"
        )
    table = family.tensor_table(model, num_tokens, num_rows)
    check_tensors(path, tensors, table, ignored="mtp." if depths else None)
    stored = tensors.locations[EMBEDDING].dtype
    dtype = DTYPES[options.dtype] if options.dtype else stored
    notes += export_notes(model, precision, config.data, options.quantizes, stored, dtype, num_rows - num_tokens)
    notes += [f"the {depths} layers of multi-token prediction are left out (--drop-mtp-layers)"] if depths else []
    token_ids, generation, more = special_tokens(origin, tokenizer, num_tokens)
    notes += more
    fields = config_json(model, precision, family, num_tokens, dtype) | token_ids
    forms: dict[str, WeightForm] = {}
    if options.quantizes:
        recipe = options.fp8_recipe or safetensors_files.default_export_recipe(precision)
        forms, more = quantized_weight_forms(model, precision, table, recipe)
        excluded = [name.removesuffix(".weight") for row in table if row.is_linear and row.name not in forms
                for name in row.hf_names]  # fmt: skip
        # transformers 5 has one name for the output layer of every family, the file may have another.
        outputs = dict.fromkeys(("lm_head", family.output_weight.removesuffix(".weight")))
        fields["quantization_config"] = safetensors_files.quantization_config(recipe, [*outputs, *excluded])
        notes += more
    batches = [tensor_batch(tensors, row, dtype, forms.get(row.name)) for row in table]
    return Export(path, config, table, batches, fields, generation, tokenizer, notes)


def choose_family(
    model: ModelConfig, requested: Optional[str], origin: Optional[Origin]
) -> tuple[HFFamily, list[str], list[str]]:
    """Return the family to write, the features of the model that it does not support, and notes.

    Args:
        requested: its model_type; None is the family that the model came from if it still supports the model.

    Raises:
        CheckpointError: there is no such family.
    """
    if requested is not None or origin is None:
        return *family_of_model(model, requested), []
    family, changes = family_of_model(model, origin.model_type)
    if not changes:
        return family, [], []
    other, problems = family_of_model(model)
    note = f"the model came from a {origin.model_type} and is a {other.model_type} now, since its settings changed: "
    return other, problems, [note + "; ".join(changes)]


def num_model_tokens(model: ModelConfig, data: DataConfig, tokenizer: Optional[Tokenizer]) -> int:
    """Return the vocabulary size without padding."""
    if tokenizer is not None:
        return dimensions.vocabulary_size(model, data, tokenizer.vocab_size)
    if model.vocab_size is None:
        raise CheckpointError("the run has neither a tokenizer nor --vocab-size, so its padding is not known")
    return model.vocab_size


def check_tensors(
    path: Path, tensors: CheckpointTensors, table: list[TensorMapping], ignored: Optional[str] = None
) -> None:
    """Raise if a checkpoint's tensors do not match its settings.

    Args:
        ignored: beginning of the names of tensors that may be there besides.

    Raises:
        CheckpointError: with all differences.
    """
    others = (OPTIMIZER_PREFIX,) if ignored is None else (OPTIMIZER_PREFIX, ignored)
    found = {
        name: location.shape
        for name, location in tensors.locations.items()
        if not (name.startswith(others) or is_extra_state(name))
    }
    expected = {row.name: row.shape for row in table}
    if problems := shape_problems(expected, found, " instead of", "such a model"):
        raise CheckpointError(f"{path} does not hold what its settings say:\n  " + "\n  ".join(sorted(problems)))


def config_json(
    model: ModelConfig, precision: PrecisionConfig, family: HFFamily, num_tokens: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the content of config.json without special tokens."""
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": DTYPE_NAMES[dtype],
        "vocab_size": num_tokens,
        **family.to_hf_config(model, precision),
    }


def quantized_weight_forms(
    model: ModelConfig, precision: PrecisionConfig, table: list[TensorMapping], recipe: str
) -> tuple[dict[str, WeightForm], list[str]]:
    """Return the form of each weight that is exported in FP8, by name in the checkpoint, and notes.

    Raises:
        CheckpointError: blocks do not divide a weight.
    """
    form = safetensors_files.weight_form(precision, recipe)
    block = form.rule.block
    chosen = [row for row in table if row.is_linear and is_fp8_candidate(row.name, model, precision)]
    notes = []
    if block is not None and (uneven := safetensors_files.uneven_weights(chosen, block)):
        without_blocks = [name for name in registry.with_export_form() if registry.get(name).block_length is None]
        raise CheckpointError(
            f"--fp8-recipe {recipe}: {uneven[0]}, which its blocks do not divide, and others would misread it; "
            f"give --fp8-recipe {' or '.join(without_blocks)}, which have no such blocks"
        )
    if derived.is_stateful(precision):
        notes.append("scales are those of the weights as they are, not of the run's amax history")
    if precision.fp8_format == "e5m2":
        notes.append("weights are E4M3 here; the run had E5M2")
    if block is not None and any(safetensors_files.has_blocks_across_matrices(row, block) for row in chosen):
        notes.append(
            f"some blocks ({form.rule.granularity}) of the run's layers hold rows of two matrices there, which have "
            "blocks of their own"
        )
    return {row.name: form for row in chosen}, notes


def is_fp8_candidate(name: str, model: ModelConfig, precision: PrecisionConfig) -> bool:
    """Return whether a tensor is of a linear that the run quantized, or any layer's linear if it quantized none."""
    found = re.match(r"decoder\.(layers\.\d+\.).*?((?:shared_)?experts\.)?(linear_\w+)\.", name)
    if found is None:
        return False
    linear = f"{found[1]}{found[2] or ''}{found[3]}"
    chosen = precision_map.resolve(model, precision)[linear]
    return chosen.is_quantized or not precision_map.is_quantized(precision)


def tensor_batch(
    tensors: CheckpointTensors, row: TensorMapping, dtype: torch.dtype, form: Optional[WeightForm]
) -> TensorBatch:
    """Return the batch of Hugging Face tensors for one tensor of the checkpoint."""
    shapes, dtype = row.hf_shapes().values(), row.dtype or dtype
    num_bytes = sum(prod(shape) for shape in shapes) * (dtype if form is None else torch.float8_e4m3fn).itemsize
    if form is not None:
        num_bytes += sum(prod(form.scale_shape(shape)) for shape in shapes) * torch.float32.itemsize

    def make() -> dict[str, Tensor]:
        tensor = tensors.load(row.name)
        if form is None:
            made = dict(zip(row.hf_names, row.layout.split(tensor.to(dtype)), strict=True))
        else:
            made = safetensors_files.quantize_weight(row, tensor, form)
        return {name: to_cpu(tensor.contiguous()) for name, tensor in made.items()}

    return TensorBatch(num_bytes, make)


def export_notes(
    model: ModelConfig, precision: PrecisionConfig, data: DataConfig, quantizes: bool, stored: torch.dtype,
    dtype: torch.dtype, num_padding: int,
) -> list[str]:  # fmt: skip
    """Return what differs from the run's model, as text."""
    notes = []
    if num_padding:
        notes.append(f"{num_padding} padding rows of the vocabulary are left out")
    if stored == torch.float32 and dtype != stored:
        notes.append(f"FP32 weights are rounded to {DTYPE_NAMES[dtype]}")
    notes += tokenizer_notes(data)
    if mixture.is_mixture(model) and mixture.has_capacity(model):
        notes.append("the run dropped tokens above the capacity of an expert; there none is dropped")
    recipes = precision_map.used_recipes(precision)
    if recipes and not quantizes:
        there = DTYPE_NAMES[dtype]
        notes.append(f"the run computed in {', '.join(recipes)}; there it computes in {there} by default")
    return notes
