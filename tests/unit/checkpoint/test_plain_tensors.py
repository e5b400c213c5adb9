"""Names of a checkpoint's tensors, and what is no checkpoint; the reading itself is tested with the tool."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megafp8.checkpoint import plain_tensors
from megafp8.checkpoint.folder import COMPLETE
from megafp8.errors import CheckpointError


def test_stacked_layers_get_their_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shapes = {
        "embedding.word_embeddings.weight": (8, 4),
        "decoder.layers.mlp.linear_fc1.weight": (2, 8, 4),
        "decoder.layers.1.mlp.linear_fc2.weight": (4, 8),
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight": (2, 8, 4),
    }
    metadata = {key: SimpleNamespace(global_shape=shape) for key, shape in shapes.items()}
    monkeypatch.setattr(plain_tensors.dist_checkpointing, "load_tensors_metadata", lambda path, strategy: metadata)
    assert plain_tensors.tensor_names(tmp_path) == {
        "embedding.word_embeddings.weight": ("embedding.word_embeddings.weight", None),
        "decoder.layers.0.mlp.linear_fc1.weight": ("decoder.layers.mlp.linear_fc1.weight", 0),
        "decoder.layers.1.mlp.linear_fc1.weight": ("decoder.layers.mlp.linear_fc1.weight", 1),
        "decoder.layers.1.mlp.linear_fc2.weight": ("decoder.layers.1.mlp.linear_fc2.weight", None),
        "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight": (
            "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", 0,
        ),
        "optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc1.weight": (
            "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", 1,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("content", [None, "no JSON", "{}", '{"sharded_backend": "torch_dist"}'])
def test_what_is_no_checkpoint_is_said_to_be_none(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / COMPLETE).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
        list(plain_tensors.load_matching(tmp_path, "*"))
