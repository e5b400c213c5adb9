"""Files of transformers' models: safetensors read a tensor at a time and written a file at a time, and JSON.

Nothing here is pickle. Only one file's tensors are in memory when files are written.

FP8 weights in the forms that others read (`recipes.base.ExportForm`): codes beside scales.

    recipe       config.json's quantization_config   scale beside `weight`                    read by
    blockwise    fp8, weight_block_size 128 x 128    `weight_scale_inv`, FP32, one a block    transformers, vLLM, SGLang
    rowwise      compressed-tensors, channel         `weight_scale`, FP32, one a row          transformers, vLLM
    tensorwise   compressed-tensors, tensor          `weight_scale`, FP32, one                transformers, vLLM

In all of them a weight is its codes (E4M3) times its scale, `weight_scale_inv` notwithstanding: it is the inverse of
what the weight was multiplied by. Blockwise is DeepSeek-V3's form.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from megafp8.checkpoint.convert.tensor_mapping import TensorMapping
from megafp8.checkpoint.directory import SPARE_BYTES, UNFINISHED
from megafp8.config.schema import PrecisionConfig
from megafp8.errors import CapabilityError, CheckpointError
from megafp8.quantization.quantize import Quantized, dequantize, quantize
from megafp8.recipes import registry
from megafp8.recipes.base import WHOLE, Block, BlockShape, Gemm, Operand, OperandRule
from megafp8.recipes.formats import E4M3
from megafp8.utils import strict_json
from megafp8.utils.files import LIST_BYTES, UnreadableFile, open_regular, sync_file, sync_folder

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pth", "*.pt")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}


def safetensors() -> Any:
    """The library.

    Raises:
        CapabilityError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise CapabilityError("files of transformers need a library: pip install safetensors") from error
    return safetensors


@dataclass(frozen=True)
class TheirTensor:
    """What a file says about a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TheirFiles:
    """The tensors of a model's folder.

    Attributes:
        folder: of the model.
        tensors: by name.

    Raises:
        CheckpointError: there are no safetensors, or they are damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[str, Any] = {}
        self.tensors: dict[str, TheirTensor] = {}
        for file in weight_files(folder):
            for name, tensor in self._read_header(folder / file):
                if name in self.tensors:
                    raise CheckpointError(f"{folder} holds {name} twice")
                self.tensors[name] = tensor

    def _read_header(self, path: Path) -> Iterator[tuple[str, TheirTensor]]:
        library = safetensors()
        try:
            open_regular(path).close()  # the library would wait for the writer of a named pipe
            file = library.safe_open(path, framework="pt")
        except (UnreadableFile, OSError, library.SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
        for name in file.keys():  # noqa: SIM118 (no dictionary)
            part = file.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise CheckpointError(f"{path}: {name} is {part.get_dtype()}; weights are {', '.join(DTYPES)}")
            self._open[name] = file
            yield name, TheirTensor(tuple(part.get_shape()), DTYPES[part.get_dtype()])

    def load(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        return self._open[name].get_tensor(name)


def weight_files(folder: Path) -> list[str]:
    """Names of the files with weights.

    Raises:
        CheckpointError: there are none, only pickles, or the index names others than its own folder's.
    """
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return [SINGLE]
        if pickles := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
            raise CheckpointError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which could run code: convert it where you trust "
                "it, with from_pretrained(FOLDER).save_pretrained(OTHER), and give that folder"
            )
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}: it is no folder of a transformers model")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{folder / INDEX} has no weight_map")
    names = sorted({str(name) for name in places.values()})
    if strange := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise CheckpointError(f"{folder / INDEX} names {strange[0]!r}: weights are in safetensors files of that folder")
    return names


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: there is none.
    """
    try:
        content = strict_json.read_json(path, LIST_BYTES)
    except UnreadableFile as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error.reason}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


@dataclass(frozen=True)
class TensorBatch:
    """Tensors that are made, and written, together.

    Attributes:
        tensors: what they will be, by name.
        make: gives them, contiguous and without memory in common.
    """

    tensors: dict[str, TheirTensor]
    make: Callable[[], dict[str, Tensor]]

    @property
    def num_bytes(self) -> int:
        """Size of all of them."""
        return sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in self.tensors.values())


def write_pieces(
    folder: Path, pieces: Sequence[TensorBatch], max_file_bytes: int, on_bytes: Callable[[int], Any]
) -> None:
    """Write safetensors files, with an index where there is more than one.

    Args:
        max_file_bytes: of tensors in a file; a piece that is larger has a file of its own.
        on_bytes: told of bytes that were made.

    Raises:
        CheckpointError: the disk has no room for them, or they cannot be written.
    """
    library, shards = safetensors(), shards_of(pieces, max_file_bytes)
    num_bytes, free = sum(piece.num_bytes for piece in pieces), shutil.disk_usage(folder).free
    if num_bytes + SPARE_BYTES > free:
        raise CheckpointError(f"{folder} has {free / 1e9:.3f} GB free and the files take {num_bytes / 1e9:.3f} GB")
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for piece in shard:
            tensors |= piece.make()
            on_bytes(piece.num_bytes)
        try:
            library.torch.save_file(tensors, folder / file, metadata={"format": "pt"})
        except (OSError, library.SafetensorError) as error:
            raise CheckpointError(f"{folder / file} cannot be written: {error}") from error
        places |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(places.items()))})


def shards_of(pieces: Sequence[TensorBatch], max_bytes: int) -> list[list[TensorBatch]]:
    """Divide pieces over files, in their order."""
    shards: list[list[TensorBatch]] = [[]]
    room = max_bytes
    for piece in pieces:
        if shards[-1] and piece.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(piece)
        room -= piece.num_bytes
    return shards


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object, indented."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write to, which gets its name when the block ends well, and is deleted when it does not.

    Raises:
        CheckpointError: the name is taken, or the folder cannot be made.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    if path.exists():
        raise CheckpointError(f"{path} exists; give a folder that does not")
    try:
        unfinished.mkdir(parents=True)
    except FileExistsError as error:
        raise CheckpointError(
            f"{unfinished} exists: another conversion writes it, or one was killed; delete it in the latter case"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{unfinished} cannot be made: {error}") from error
    try:
        yield unfinished
        for file in unfinished.rglob("*"):
            if file.is_file():
                sync_file(file)
        os.rename(unfinished, path)
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


IN_HIGH_PRECISION = ("lm_head",)


def scale_suffixes() -> tuple[str, ...]:
    """What can stand for `weight` in the names of scales."""
    forms = (recipe.export_form for recipe in registry.recipes())
    return tuple(dict.fromkeys(form.scale_suffix for form in forms if form is not None))


def recipes_without_blocks() -> tuple[str, ...]:
    """Recipes with a form that no weight is too uneven for."""
    return tuple(name for name in registry.with_export_form() if registry.get(name).block_length is None)


def recipe_of_run(precision: PrecisionConfig) -> str:
    """The form that is nearest to a run's own recipe."""
    if precision.fp8_format is None:
        return registry.DEFAULT_EXPORT
    recipe = registry.get(precision.fp8_recipe)
    return recipe.name if recipe.export_form is not None else recipe.exported_as or registry.DEFAULT_EXPORT


class WeightForm(NamedTuple):
    """How weights are written.

    Attributes:
        rule: quantizes them, as the recipe does it in the run, with the run's choice of scales.
        scale_suffix: follows a weight's name without `weight`.
    """

    rule: OperandRule
    scale_suffix: str

    def scale_name(self, name: str) -> str:
        """What the scale of a weight is called."""
        return name.removesuffix("weight") + self.scale_suffix

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a weight's scale."""
        block = self.rule.for_shape((shape[0], shape[1])).block
        if block is None:
            return (1,)
        return tuple(math.ceil(size / length) for size, length in zip(shape, block, strict=True))


def weight_form(precision: PrecisionConfig, recipe: str) -> WeightForm:
    """The form of a recipe of `registry.with_export_form`."""
    known = registry.get(recipe)
    rule = known.rules("e4m3", vars(precision)).rule(Operand.WEIGHT, Gemm.FPROP)
    assert rule is not None and known.export_form is not None
    return WeightForm(rule, known.export_form.scale_suffix)


def quantization_config(recipe: str, kept: Sequence[str]) -> dict[str, Any]:
    """What config.json says about the weights.

    Args:
        kept: modules in high precision, besides embedding and output layer.
    """
    form = registry.get(recipe).export_form
    assert form is not None, f"{recipe} has no form that others read"
    return {**form.quantization_config, form.excluded_key: [*IN_HIGH_PRECISION, *kept]}


def quantized_parts(row: TensorMapping, whole: Tensor, form: WeightForm) -> dict[str, Tensor]:
    """Codes and scales of a linear's weight under their names.

    A scale of a whole tensor is that of ours, which a layer's queries, keys and values share, as gate and up projection
    do. Blocks are those of each matrix there; they are the blocks of ours where no block of ours holds rows of two.
    """
    if form.rule.block is None:
        quantized = quantize(whole, form.rule)
        parts = row.layout.split(quantized.codes)
        scales: Sequence[Tensor] = [quantized.dequant_scale.reshape(1).clone() for _ in parts]
    else:
        each = [quantize(part, form.rule) for part in row.layout.split(whole)]
        parts, scales = [one.codes for one in each], [one.dequant_scale for one in each]
    named: dict[str, Tensor] = {}
    for name, codes, scale in zip(row.theirs, parts, scales, strict=True):
        named[name] = codes
        named[form.scale_name(name)] = scale
    return named


def ragged(rows: Sequence[TensorMapping], block: BlockShape) -> list[str]:
    """The weights there that end within a block, which is then mistaken: transformers divides a weight evenly."""

    def is_uneven(shape: Sequence[int]) -> bool:
        lengths = [(size, length) for size, length in zip(shape, block, strict=True) if length is not WHOLE]
        return any(size > length and size % length for size, length in lengths)

    return [
        f"{name} is {' x '.join(map(str, shape))}"
        for row in rows
        for name, shape in row.their_shapes().items()
        if is_uneven(shape)
    ]


def has_blocks_of_two(row: TensorMapping, block: BlockShape) -> bool:
    """Whether a block of our weight holds rows of two blocks of theirs."""
    height = row.shape[0] if block[0] is WHOLE else block[0]
    labels = [
        torch.arange(shape[0])[:, None] // height + index * row.shape[0]
        for index, shape in enumerate(row.their_shapes().values())
    ]
    return any(len(part.unique()) > 1 for part in row.layout.join(labels).split(height))


def dequantized(codes: Tensor, scale: Tensor, block: Optional[Block], dtype: torch.dtype) -> Tensor:
    """codes x scale in FP32, rounded to `dtype`.

    Args:
        block: that shares a scale; None is the whole tensor.
    """
    scale = scale.float()
    rule = OperandRule(format=E4M3, block=block)
    return dequantize(Quantized(codes, scale.reshape(()) if block is None else scale, None, rule), dtype)


def block_of(shape: Sequence[int], scale: Sequence[int], block_size: Any) -> Block | str | None:
    """What part of a weight shares a scale, from the shapes; None is all of it, and a text what is wrong.

    Args:
        block_size: of the quantization_config, where it has one.
    """
    if math.prod(scale) == 1:
        return None
    if tuple(scale) == (shape[0], 1):
        return (1, shape[1])
    if isinstance(block_size, list) and len(block_size) == 2 and all(isinstance(n, int) and n > 0 for n in block_size):
        block = (block_size[0], block_size[1])
        if tuple(scale) == tuple(math.ceil(size / length) for size, length in zip(shape, block, strict=True)):
            return block
    return f"scales {tuple(scale)} do not fit a weight {tuple(shape)} in blocks of {block_size}"
