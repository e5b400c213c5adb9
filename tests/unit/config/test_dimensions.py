"""Dimensions that follow from defaults and from padding."""

from dataclasses import replace

import pytest

from megafp8.config import dimensions
from megafp8.config.schema import ModelConfig, RunConfig
from megafp8.config.settings import with_values


def test_mlp_width_is_megatrons():
    assert dimensions.ffn_hidden_size(ModelConfig(hidden_size=768)) == 3072
    assert dimensions.ffn_hidden_size(ModelConfig(hidden_size=768, swiglu=True)) == 2048
    assert dimensions.ffn_hidden_size(ModelConfig(hidden_size=2048, swiglu=True)) == 5440
    assert dimensions.ffn_hidden_size(ModelConfig(hidden_size=8, ffn_hidden_size=5)) == 5


def test_attention_heads():
    model = ModelConfig(hidden_size=64, num_attention_heads=4, num_query_groups=2)
    assert dimensions.num_query_groups(model) == 4  # not grouped without the switch
    grouped = replace(model, group_query_attention=True)
    assert (dimensions.num_query_groups(grouped), dimensions.kv_projection_size(grouped)) == (2, 32)


@pytest.mark.parametrize(
    ("changes", "vocab", "padded"),
    [
        ({}, 50_257, 50_304),
        ({}, 50_304, 50_304),
        ({"parallel.tensor_model_parallel_size": 8}, 50_257, 51_200),
        ({"model.make_vocab_size_divisible_by": 1}, 257, 257),
        ({"model.make_vocab_size_divisible_by": 1, "precision.fp8_format": "e4m3"}, 257, 272),
        (
            {
                "model.make_vocab_size_divisible_by": 3,
                "precision.fp8_format": "e4m3",
                "precision.fp8_recipe": "mxfp8",
                "parallel.tensor_model_parallel_size": 2,
            },
            100,
            192,
        ),
    ],
)
def test_padded_vocabulary(changes, vocab, padded):
    config = with_values(RunConfig(), changes)
    assert dimensions.padded_vocab_size(config, vocab) == padded
    assert padded % config.parallel.tensor_model_parallel_size == 0


@pytest.mark.parametrize(
    ("changes", "exchange"),
    [
        ({}, "a2a"),
        ({"data.reset_attention_mask": False}, "p2p"),
        ({"parallel.cp_comm_type": "allgather"}, "allgather"),
        ({"parallel.cp_comm_type": "a2a+p2p"}, "a2a+p2p"),
        ({"parallel.tensor_model_parallel_size": 4}, "a2a"),
        ({"parallel.tensor_model_parallel_size": 8}, "allgather"),
        ({"model.group_query_attention": True, "model.num_query_groups": 1}, "allgather"),
        ({"model.softmax_type": "learnable"}, "allgather"),
        ({"precision.deterministic_mode": True}, "allgather"),
        ({"model.num_attention_heads": None}, "allgather"),
    ],
)
def test_documents_have_no_ring(changes, exchange):
    """Of two context-parallel ranks, with 8 heads."""
    documents = {"data.reset_attention_mask": True, "parallel.context_parallel_size": 2, "model.num_attention_heads": 8}
    assert dimensions.cp_exchange(with_values(RunConfig(), documents | changes)) == exchange
