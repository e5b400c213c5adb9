"""A checkpoint as the folder of a transformers model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from megafp8.checkpoint.convert import safetensors_files
from megafp8.checkpoint.convert.families import family_of_run
from megafp8.checkpoint.convert.safetensors_files import TensorBatch, TheirTensor, WeightForm, write_json, write_pieces
from megafp8.checkpoint.convert.tensor_mapping import Family, TensorMapping
from megafp8.checkpoint.convert.tokenizer import notes_on_tokenizer, open_tokenizer, write_tokenizer
from megafp8.checkpoint.directory import find_checkpoint
from megafp8.checkpoint.manifest import NAME, check_complete
from megafp8.checkpoint.metadata import read_config
from megafp8.checkpoint.standalone import PlainTensors
from megafp8.checkpoint.state_dict import EMBEDDING
from megafp8.checkpoint.writer import on_cpu
from megafp8.config import derived, precision_map
from megafp8.config.schema import RunConfig
from megafp8.data.tokenizers.build import Tokenizer
from megafp8.errors import CheckpointError
from megafp8.mcore.overrides import DTYPES

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What may be chosen.

    Attributes:
        step: of the checkpoint; None is the newest.
        dtype: `bf16` or `fp32`; None is as stored.
        quantizes: the linears' weights become FP8.
        fp8_recipe: by which one; None is the one nearest to the run's.
        tokenizer_files: fields of the data section that say where the tokenizer's files are now.
        ignores_overrides: accept a run with `--override transformer.FIELD=VALUE`.
    """

    step: Optional[int] = None
    dtype: Optional[str] = None
    quantizes: bool = False
    fp8_recipe: Optional[str] = None
    tokenizer_files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignores_overrides: bool = False


@dataclass(frozen=True)
class Export:
    """A conversion that is about to be made.

    Attributes:
        path: the checkpoint.
        table: its tensors.
        pieces: what will be written.
        fields: config.json.
        tokenizer: None where the run has none.
        notes: what a person should know, in words.
    """

    path: Path
    config: RunConfig
    table: list[TensorMapping]
    pieces: list[TensorBatch]
    fields: dict[str, Any]
    tokenizer: Optional[Tokenizer]
    notes: list[str]

    @property
    def num_bytes(self) -> int:
        """Of all tensors there."""
        return sum(piece.num_bytes for piece in self.pieces)

    def write(self, folder: Path, max_file_bytes: int, on_bytes: Callable[[int], Any]) -> None:
        """Fill a folder.

        Raises:
            CheckpointError: it cannot be written.
        """
        write_pieces(folder, self.pieces, max_file_bytes, on_bytes)
        write_json(folder / "config.json", self.fields)
        write_json(folder / "generation_config.json", ends(self.tokenizer))
        write_tokenizer(self.config.data, folder)


def plan_export(source: Path, options: ExportOptions) -> Export:
    """Look at everything that could be wrong before anything is written.

    Args:
        source: a run's folder, or a checkpoint's.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it cannot be expressed there.
        DataError: the tokenizer's files are missing.
    """
    path = checkpoint_of(source, options.step)
    check_complete(path)
    config = with_places(read_config(path), options.tokenizer_files)
    family, problems = family_of_run(config)
    if config.overrides and not options.ignores_overrides:
        problems += [
            f"--override {each}: may make it another model; --ignore-overrides if it does not"
            for each in config.overrides if each.startswith("transformer.")
        ]  # fmt: skip
    if options.quantizes and family.model_type != "llama":
        problems.append(f"--fp8: those who read FP8 weights know linears, and {family.model_type} has Conv1D")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(f"{path} cannot be expressed as a model of type {family.model_type}:\n{lines}")
    tensors = PlainTensors(path)
    tokenizer = open_tokenizer(config.data, config.model.vocab_size)
    num_tokens, num_rows = vocabulary(config, tokenizer), tensors.places[EMBEDDING].shape[0]
    if derived.padded_vocab_size(config, num_tokens) != num_rows:
        raise CheckpointError(
            f"the embedding in {path} has {num_rows} rows, which are no {num_tokens} tokens and their padding: "
            "--tokenizer-model names the tokenizer that it was trained with"
        )
    table = family.rows(config.model, num_tokens, num_rows)
    check_table(path, tensors, table)
    dtype = DTYPES[options.dtype] if options.dtype else tensors.places[EMBEDDING].dtype
    notes = notes_on(config, options, tensors.places[EMBEDDING].dtype, dtype, num_rows - num_tokens)
    fields = config_json(config, family, num_tokens, dtype, tokenizer)
    forms: dict[str, WeightForm] = {}
    if options.quantizes:
        recipe = options.fp8_recipe or safetensors_files.recipe_of_run(config.precision)
        forms, more = quantization(config, table, recipe)
        kept = [name.removesuffix(".weight") for row in table if row.is_linear and row.ours not in forms
                for name in row.theirs]  # fmt: skip
        fields["quantization_config"] = safetensors_files.quantization_config(recipe, kept)
        notes += more
    pieces = [piece(tensors, row, dtype, forms.get(row.ours)) for row in table]
    return Export(path, config, table, pieces, fields, tokenizer, notes)


def checkpoint_of(source: Path, step: Optional[int]) -> Path:
    """The checkpoint that a run's folder, or its own, stands for.

    Raises:
        CheckpointError: there is none.
    """
    if NAME.fullmatch(source.resolve().name) and step is None:
        return source
    found = find_checkpoint(source, step)
    if found is None:
        raise CheckpointError(f"{source} holds no checkpoint; give the folder that a run had as --save")
    return found[1]


def with_places(saved: RunConfig, tokenizer_files: Mapping[str, str]) -> RunConfig:
    """The run's settings, with the tokenizer where it is now, and with the number of positions."""
    positions = saved.model.max_position_embeddings or saved.data.seq_length
    return dataclasses.replace(
        saved,
        model=dataclasses.replace(saved.model, max_position_embeddings=positions),
        data=dataclasses.replace(saved.data, **tokenizer_files),
    )


def vocabulary(config: RunConfig, tokenizer: Optional[Tokenizer]) -> int:
    """Tokens of the model, without padding."""
    if tokenizer is not None:
        return derived.vocabulary_size(config, tokenizer.vocab_size)
    if config.model.vocab_size is None:
        raise CheckpointError("the run has neither a tokenizer nor --vocab-size, so its padding is not known")
    return config.model.vocab_size


def check_table(path: Path, tensors: PlainTensors, table: list[TensorMapping]) -> None:
    """Compare a checkpoint with what its settings say is in it.

    Raises:
        CheckpointError: it holds other tensors.
    """
    found = {name: place.shape for name, place in tensors.places.items() if not name.startswith("optimizer.")}
    expected = {row.ours: row.shape for row in table}
    problems = [f"{name} is missing" for name in expected.keys() - found.keys()]
    problems += [f"{name} is not part of such a model" for name in found.keys() - expected.keys() if is_weight(name)]
    problems += [
        f"{name} has shape {found[name]} instead of {shape}"
        for name, shape in expected.items() if name in found and found[name] != shape
    ]  # fmt: skip
    if problems:
        raise CheckpointError(f"{path} does not hold what its settings say:\n  " + "\n  ".join(sorted(problems)))


def is_weight(name: str) -> bool:
    """Not what quantizing layers remember."""
    return ".quantizer_state." not in name and "_extra_state" not in name


def config_json(
    config: RunConfig, family: Family, num_tokens: int, dtype: torch.dtype, tokenizer: Optional[Tokenizer]
) -> dict[str, Any]:
    """The whole of config.json."""
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": DTYPE_NAMES[dtype],
        "vocab_size": num_tokens,
        **family.to_theirs(config),
        **ends(tokenizer),
    }


def ends(tokenizer: Optional[Tokenizer]) -> dict[str, Any]:
    """The tokens that begin and end a text: each document followed the end of the one before."""
    token = None if tokenizer is None else tokenizer.eod
    return {"bos_token_id": token, "eos_token_id": token}


def quantization(config: RunConfig, table: list[TensorMapping], recipe: str) -> tuple[dict[str, WeightForm], list[str]]:
    """The form of each weight that becomes FP8, by our name, and what a person should know.

    Raises:
        CheckpointError: blocks do not divide a weight.
    """
    precision = config.precision
    form = safetensors_files.weight_form(precision, recipe)
    block = form.rule.block
    chosen = [row for row in table if row.is_linear and may_be_fp8(row.ours, config)]
    notes = []
    if block is not None and (uneven := safetensors_files.ragged(chosen, block)):
        raise CheckpointError(
            f"--fp8-recipe {recipe}: {uneven[0]}, which its blocks do not divide, and others would misread it; "
            f"give --fp8-recipe {' or '.join(safetensors_files.recipes_without_blocks())}, which have no such blocks"
        )
    if derived.is_stateful(precision):
        notes.append("scales are those of the weights as they are, not of the run's amax history")
    if precision.fp8_format == "e5m2":
        notes.append("weights are E4M3 here; the run had E5M2")
    if block is not None and any(safetensors_files.has_blocks_of_two(row, block) for row in chosen):
        notes.append(
            f"some blocks ({form.rule.granularity}) of the run's layers hold rows of two matrices there, which have "
            "blocks of their own"
        )
    return {row.ours: form for row in chosen}, notes


def may_be_fp8(name: str, config: RunConfig) -> bool:
    """Whether a tensor is of a layer's linear that the run did not keep in high precision while it quantized others."""
    found = re.match(r"decoder\.(layers\.\d+)\..*\.(linear_\w+)\.", name)
    if found is None:
        return False
    chosen = precision_map.resolve(config.model, config.precision)[f"{found[1]}.{found[2]}"]
    return chosen.is_quantized or not precision_map.is_quantized(config.precision)


def piece(tensors: PlainTensors, row: TensorMapping, dtype: torch.dtype, form: Optional[WeightForm]) -> TensorBatch:
    """The tensors there that come of one tensor here."""
    shapes = row.their_shapes()
    if form is None:
        described = {name: TheirTensor(shape, dtype) for name, shape in shapes.items()}
    else:
        described = {name: TheirTensor(shape, torch.float8_e4m3fn) for name, shape in shapes.items()}
        for name, shape in shapes.items():
            described[form.scale_name(name)] = TheirTensor(form.scale_shape(shape), torch.float32)

    def make() -> dict[str, Tensor]:
        whole = tensors.load(row.ours)
        if form is None:
            made = dict(zip(row.theirs, row.layout.split(whole.to(dtype)), strict=True))
        else:
            made = safetensors_files.quantized_parts(row, whole, form)
        return {name: on_cpu(tensor.contiguous()) for name, tensor in made.items()}

    return TensorBatch(described, make)


def notes_on(
    config: RunConfig, options: ExportOptions, stored: torch.dtype, dtype: torch.dtype, num_padding: int
) -> list[str]:
    """What is another way there."""
    notes = []
    if num_padding:
        notes.append(f"{num_padding} padding rows of the vocabulary are left out")
    if stored == torch.float32 and dtype != stored:
        notes.append(f"FP32 weights are rounded to {DTYPE_NAMES[dtype]}")
    notes += notes_on_tokenizer(config.data)
    recipes = precision_map.used_recipes(config.precision)
    if recipes and not options.quantizes:
        there = DTYPE_NAMES[dtype]
        notes.append(f"the run computed in {', '.join(recipes)}; there it computes in {there} unless told otherwise")
    return notes
