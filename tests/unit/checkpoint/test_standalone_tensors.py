"""Single tensors of a checkpoint: their names, written and read; and folders that are no checkpoint."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from weakref import WeakSet

import pytest
import torch
from saved_run import configure
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from megafp8.checkpoint.manifest import MANIFEST, find_damage
from megafp8.checkpoint.standalone import (
    CheckpointTensors,
    LazyTensor,
    TensorLocation,
    load_matching,
    save_weights,
    tensor_locations,
)
from megafp8.checkpoint.writer import FILES_PER_RANK
from megafp8.errors import CheckpointError

FLAGS = "--num-layers 3 --hidden-size 4 --num-attention-heads 1 --vocab-size 7"


def test_stacked_layers_are_numbered() -> None:
    def locations(key: str, shape: tuple[int, ...]) -> dict[str, TensorLocation]:
        kind = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size(shape), [])
        return dict(tensor_locations(key, kind))

    for prefix in ("", "optimizer.state.exp_avg."):
        key = prefix + "decoder.layers.mlp.linear_fc1.weight"
        assert locations(key, (2, 8, 4)) == {
            f"{prefix}decoder.layers.{layer}.mlp.linear_fc1.weight": TensorLocation(key, layer, (8, 4), torch.bfloat16)
            for layer in (0, 1)
        }
    for key in ("embedding.word_embeddings.weight", "decoder.layers.1.mlp.linear_fc2.weight"):
        assert locations(key, (8, 4)) == {key: TensorLocation(key, None, (8, 4), torch.bfloat16)}


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Weights of three layers, under the names of single tensors."""
    generator = torch.Generator().manual_seed(1)
    shapes = {f"decoder.layers.{layer}.mlp.linear_fc1.weight": (6, 4) for layer in range(3)}
    shapes |= {"embedding.word_embeddings.weight": (8, 4), "decoder.final_layernorm.weight": (4,)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


@pytest.fixture
def saved(weights: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    sources = {
        name: LazyTensor(tuple(value.shape), value.dtype, partial(weights.get, name)) for name, value in weights.items()
    }
    return save_weights(tmp_path / "run", configure(FLAGS), sources)


def test_written_tensors_read_back(weights: dict[str, torch.Tensor], saved: Path) -> None:
    assert find_damage(saved) == [] and saved.name == "iter_0000000"
    tensors = CheckpointTensors(saved)
    assert set(tensors.locations) == set(weights)
    for name in reversed(weights):
        assert torch.equal(tensors.load(name), weights[name])
    assert tensors.locations["decoder.layers.2.mlp.linear_fc1.weight"].layer == 2


def test_each_writer_holds_one_tensor_at_a_time(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    alive: "WeakSet[torch.Tensor]" = WeakSet()
    most = 0

    def make(name: str) -> torch.Tensor:
        nonlocal most
        most = max(most, len(alive))
        tensor = weights[name].clone()
        alive.add(tensor)
        return tensor

    sources = {
        name: LazyTensor(tuple(value.shape), value.dtype, partial(make, name)) for name, value in weights.items()
    }
    save_weights(tmp_path / "run", configure(FLAGS), sources)
    assert most <= 2 * FILES_PER_RANK < len(weights)


def test_a_source_with_a_wrong_tensor_is_an_error(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    name = "embedding.word_embeddings.weight"
    sources = {name: LazyTensor((8, 5), torch.bfloat16, lambda: weights[name])}
    with pytest.raises(CheckpointError, match="expected"):
        save_weights(tmp_path / "run", configure(FLAGS), sources)


def test_a_missing_layer_is_an_error(saved: Path) -> None:
    tensors = CheckpointTensors(saved)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    kind = tensors._kinds[tensors.locations[name].key]
    kind.chunks.pop(1)
    with pytest.raises(CheckpointError, match="does not contain all of decoder.layers.1.mlp"):
        tensors.load(name)


@pytest.mark.parametrize("content", [None, "no JSON", "{}", '{"sharded_backend": "torch_dist"}'])
def test_other_folders_than_checkpoints_are_an_error(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / MANIFEST).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
        list(load_matching(tmp_path, "*"))


def test_a_stack_of_absurdly_many_layers_is_refused(saved: Path) -> None:
    """Before one name is made for each layer."""
    path = saved / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"].size = torch.Size([1 << 30, 6, 4])
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"lists 1,073,741,826 tensors of layers, more than 1,000,000"):
        CheckpointTensors(saved)
