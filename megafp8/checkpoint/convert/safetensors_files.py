"""Safetensors files of Hugging Face models: read one tensor at a time, written one file at a time.

Nothing is pickled.

FP8 weights are exported as codes and dequantization scales, in forms that others read (`recipes.base.ExportForm`).

    recipe       config.json's quantization_config   scale tensor                             read by
    blockwise    fp8, weight_block_size 128 x 128    `weight_scale_inv`, FP32, per block      transformers, vLLM, SGLang
    rowwise      compressed-tensors, channel         `weight_scale`, FP32, per row            transformers, vLLM
    tensorwise   compressed-tensors, tensor          `weight_scale`, FP32, one                transformers, vLLM

In all forms a weight is its codes (E4M3) times the scale. The name `weight_scale_inv` means the inverse of the scale
that the weight was multiplied by. Blockwise is DeepSeek-V3's form.
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
from megafp8.checkpoint.manifest import MANIFEST
from megafp8.config.schema import PrecisionConfig
from megafp8.errors import CapabilityError, CheckpointError
from megafp8.quantization.quantize import dequantize, quantize
from megafp8.quantization.quantized_tensor import Quantized
from megafp8.recipes import registry
from megafp8.recipes.base import FULL_DIM, Block, BlockShape, Gemm, Operand, OperandRule
from megafp8.recipes.formats import E4M3
from megafp8.utils import strict_json
from megafp8.utils.files import LIST_BYTES, UnreadableFile, open_regular, sync_file, sync_folder
from megafp8.utils.object_store import ObjectFolder, url_of

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pth", "*.pt")
SAFETENSORS_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
# Of buffers, which are not weights: masks in the files of GPT-2 and Pythia.
BUFFER_DTYPES = {"BOOL": torch.bool, "U8": torch.uint8, "I64": torch.int64}


def safetensors() -> Any:
    """Return the library.

    Raises:
        CapabilityError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise CapabilityError("files of transformers need a library: pip install safetensors") from error
    return safetensors


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        name: in the file.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def load(self) -> Tensor:
        """Load it to the CPU.

        The file is opened again, so that the pages that were read are released together with the tensor.
        """
        with safetensors().safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.name)
        return tensor


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model's folder by name, without reading them.

    Raises:
        CheckpointError: there are no safetensors files, or they are damaged.
    """
    library, found = safetensors(), dict[str, StoredTensor]()
    for path in weight_files(folder):
        try:
            open_regular(path).close()  # safetensors would block on a named pipe
            file = library.safe_open(path, framework="pt")
        except (UnreadableFile, OSError, library.SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
        for name in file.keys():  # noqa: SIM118 (not a dict)
            header = file.get_slice(name)
            dtype = SAFETENSORS_DTYPES.get(header.get_dtype()) or BUFFER_DTYPES.get(header.get_dtype())
            if dtype is None:
                raise CheckpointError(
                    f"{path}: {name} is {header.get_dtype()}; weights are {', '.join(SAFETENSORS_DTYPES)}"
                )
            if name in found:
                raise CheckpointError(f"{folder} holds {name} twice")
            found[name] = StoredTensor(path, name, tuple(header.get_shape()), dtype)
    return found


def weight_files(folder: Path) -> list[Path]:
    """Return the files with weights.

    Raises:
        CheckpointError: there are none or only pickles, or the index names files outside the folder.
    """
    if not (folder / INDEX_FILE).is_file():
        if (folder / SINGLE_FILE).is_file():
            return [folder / SINGLE_FILE]
        if pickles := sorted(path.name for pattern in PICKLE_PATTERNS for path in folder.glob(pattern)):
            raise CheckpointError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which could run code: convert it where you trust "
                "it, with from_pretrained(FOLDER).save_pretrained(OTHER), and give that folder"
            )
        raise CheckpointError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: it is no folder of a transformers model"
        )
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    if invalid := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise CheckpointError(
            f"{folder / INDEX_FILE} names {invalid[0]!r}: weights are in safetensors files of that folder"
        )
    return [folder / name for name in names]


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file.

    Raises:
        CheckpointError: the file cannot be read or is not a JSON object.
    """
    try:
        content = strict_json.read_json(path, LIST_BYTES)
    except UnreadableFile as error:
        if not path.exists():
            raise CheckpointError(
                f"{path.parent} is no folder of a Hugging Face model: it has no {path.name}"
            ) from error
        raise CheckpointError(f"{path} cannot be read as JSON: {error.reason}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class TensorBatch:
    """Tensors that are made together.

    Attributes:
        num_bytes: size of all of them.
        make: returns them by name, contiguous.
    """

    num_bytes: int
    make: Callable[[], dict[str, Tensor]]


def write_batches(
    folder: Path, batches: Sequence[TensorBatch], max_file_bytes: int, on_bytes: Callable[[int], Any]
) -> None:
    """Write safetensors files, with an index if there is more than one. Memory holds the tensors of one file.

    Args:
        max_file_bytes: of tensors per file; a larger batch gets a separate file.
        on_bytes: called with the size of each batch that was made.

    Raises:
        CheckpointError: the disk has not enough free space, or a file cannot be written.
    """
    library, shards = safetensors(), split_into_files(batches, max_file_bytes)
    num_bytes, free = sum(batch.num_bytes for batch in batches), shutil.disk_usage(folder).free
    if num_bytes + SPARE_BYTES > free:
        raise CheckpointError(f"{folder} has {free / 1e9:.3f} GB free and the files take {num_bytes / 1e9:.3f} GB")
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for batch in shard:
            tensors |= batch.make()
            on_bytes(batch.num_bytes)
        weight_map |= dict.fromkeys(tensors, file)
        try:
            (folder / file).touch()
            # The library replaces the file by one that only its owner may read.
            mode = (folder / file).stat().st_mode
            library.torch.save_file(tensors, folder / file, {"format": "pt"})
            (folder / file).chmod(mode)
        except (OSError, library.SafetensorError) as error:
            raise CheckpointError(f"{folder / file} cannot be written: {error}") from error
    if len(shards) > 1:
        write_json(
            folder / INDEX_FILE, {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        )


def split_into_files(batches: Sequence[TensorBatch], max_bytes: int) -> list[list[TensorBatch]]:
    """Divide batches over files, in order."""
    shards: list[list[TensorBatch]] = [[]]
    room = max_bytes
    for batch in batches:
        if shards[-1] and batch.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(batch)
        room -= batch.num_bytes
    return shards


@contextmanager
def publish_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `path` on success and deleted on failure.

    If `path` is the place of a URL in the local cache, the folder is then uploaded.

    Raises:
        CheckpointError: `path` exists, or the folder cannot be made or a file cannot be read or written.
    """
    unfinished, url = path.with_name(path.name + UNFINISHED), url_of(path)
    try:
        if url is not None and ObjectFolder(url).find():
            raise CheckpointError(f"{url} exists; give a folder that does not")
    except OSError as error:
        raise CheckpointError(str(error)) from error
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
        if url is not None:
            upload_folder(path, url)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{path} was not written: {error}") from error
        raise


def upload_folder(path: Path, url: str) -> None:
    """Upload a folder; what makes it one of its kind comes last.

    Raises:
        CheckpointError: a request failed. The local folder stays.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file())
    try:
        folder = ObjectFolder(url)
        for file in sorted(files, key=lambda file: file.name in (MANIFEST, "config.json")):
            folder.upload(file, file.relative_to(path).as_posix())
    except OSError as error:
        raise CheckpointError(f"{path} is complete, but was not uploaded: {error}") from error
    print(f"uploaded to {url}, {len(files)} files; a copy is in {path}", flush=True)


def scale_suffixes() -> tuple[str, ...]:
    """Return what replaces `weight` in the names of scales."""
    forms = (recipe.export_form for recipe in registry.recipes())
    return tuple(dict.fromkeys(form.scale_suffix for form in forms if form is not None))


def default_export_recipe(precision: PrecisionConfig) -> str:
    """Return the recipe whose export form is closest to a run's own recipe."""
    if precision.fp8_format is None:
        return registry.DEFAULT_EXPORT
    recipe = registry.get(precision.fp8_recipe)
    return recipe.name if recipe.export_form is not None else recipe.exported_as or registry.DEFAULT_EXPORT


class WeightForm(NamedTuple):
    """How a weight is exported.

    Attributes:
        rule: quantizes the weight as the recipe does during training, with the run's choice of scales.
        scale_suffix: replaces `weight` in the name of the scale.
    """

    rule: OperandRule
    scale_suffix: str

    def scale_name(self, name: str) -> str:
        """Return the name of a weight's scale."""
        return name.removesuffix("weight") + self.scale_suffix

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a weight's scale."""
        if self.rule.block is None:
            return (1,)
        return tuple(math.ceil(size / (length or size)) for size, length in zip(shape, self.rule.block, strict=True))


def weight_form(precision: PrecisionConfig, recipe: str) -> WeightForm:
    """Return the form of a recipe in `registry.with_export_form`."""
    known = registry.get(recipe)
    rule = known.rules("e4m3", vars(precision)).rule(Operand.WEIGHT, Gemm.FPROP)
    assert rule is not None and known.export_form is not None
    return WeightForm(rule, known.export_form.scale_suffix)


def quantization_config(recipe: str, excluded: Sequence[str]) -> dict[str, Any]:
    """Return `quantization_config` of config.json.

    Args:
        excluded: modules in high precision, besides the embedding.
    """
    form = registry.get(recipe).export_form
    assert form is not None, f"{recipe} has no form that others read"
    return {**form.quantization_config, form.excluded_key: list(excluded)}


def quantize_weight(row: TensorMapping, weight: Tensor, form: WeightForm) -> dict[str, Tensor]:
    """Return codes and dequantization scales of a linear's weight, by Hugging Face name.

    A per-tensor scale is that of the megatron-core weight: query, key and value share it, and so do gate and up
    projection. Each expert has its own. Blocks are those of each Hugging Face matrix. They equal the blocks of the
    megatron-core weight unless one of these contains rows of two matrices.
    """
    experts = row.matrices()
    if len(experts) > 1:
        pairs = zip(experts, weight, strict=True)
        return {
            name: each for mapping, expert in pairs for name, each in quantize_weight(mapping, expert, form).items()
        }
    if form.rule.block is None:
        quantized = quantize(weight, form.rule)
        parts = [(codes, quantized.dequant_scale.reshape(1).clone()) for codes in row.layout.split(quantized.codes)]
    else:
        quantized_parts = [quantize(part, form.rule) for part in row.layout.split(weight)]
        parts = [(part.codes, part.dequant_scale) for part in quantized_parts]
    tensors: dict[str, Tensor] = {}
    for name, (codes, dequant_scale) in zip(row.hf_names, parts, strict=True):
        tensors[name] = codes
        tensors[form.scale_name(name)] = dequant_scale
    return tensors


def uneven_weights(rows: Sequence[TensorMapping], block: BlockShape) -> list[str]:
    """Return the weights that blocks do not divide evenly: transformers would misread them."""

    def is_uneven(shape: Sequence[int]) -> bool:
        lengths = [(size, length) for size, length in zip(shape, block, strict=True) if length is not FULL_DIM]
        return any(size > length and size % length for size, length in lengths)

    return [
        f"{name} is {' x '.join(map(str, shape))}"
        for row in rows
        for name, shape in row.hf_shapes().items()
        if is_uneven(shape)
    ]


def has_blocks_across_matrices(row: TensorMapping, block: BlockShape) -> bool:
    """Return whether a block of a megatron-core weight contains rows of two Hugging Face blocks."""
    row = row.matrices()[0]
    height = row.shape[0] if block[0] is FULL_DIM else block[0]
    labels = [
        torch.arange(shape[0])[:, None] // height + index * row.shape[0]
        for index, shape in enumerate(row.hf_shapes().values())
    ]
    return any(len(part.unique()) > 1 for part in row.layout.join(labels).split(height))


def dequantize_weight(codes: Tensor, dequant_scale: Tensor, block: Optional[Block], dtype: torch.dtype) -> Tensor:
    """Return codes x scale in FP32, rounded to `dtype`.

    Args:
        block: that shares a scale; None for a per-tensor scale.
    """
    dequant_scale = dequant_scale.float()
    if block is None:
        dequant_scale = dequant_scale.reshape(())
    return dequantize(Quantized(codes, dequant_scale, None, OperandRule(format=E4M3, block=block)), dtype)


def scale_block(shape: Sequence[int], scale: Sequence[int], block_size: Any) -> Block | str | None:
    """Return the block shape that shares a scale, from the shapes of a weight and of its scales.

    Args:
        block_size: `weight_block_size` of the quantization_config, if any.

    Returns:
        None for a per-tensor scale; a text if the shapes do not fit.
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
