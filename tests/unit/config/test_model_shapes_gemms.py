"""GEMM dimensions after splitting, and the fix for those that an FP8 recipe does not support."""

from megafp8.config.gemm_alignment import gemm_alignment_problems
from megafp8.config.model_shapes import PRESETS, GemmDimensions, gemm_dimensions
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values


def config_of(preset="llama3-8b", **changes):
    values = {
        "data.seq_length": 8192,
        "training.micro_batch_size": 1,
        "precision.fp8_format": "hybrid",
        "precision.fp8_recipe": "tensorwise",
    }
    names = {name.replace("__", "."): value for name, value in changes.items()}
    return with_values(RunConfig(), PRESETS[preset] | values | names)


def test_dimensions_after_tensor_parallel_splitting():
    config = config_of(parallel__tensor_model_parallel_size=4, parallel__sequence_parallel=True)
    assert gemm_dimensions(config) == [
        GemmDimensions("linear_qkv", (4096 + 2 * 1024) // 4, 4096, 2048),
        GemmDimensions("linear_proj", 4096, 1024, 8192),
        GemmDimensions("linear_fc1", 2 * 14_336 // 4, 4096, 2048),
        GemmDimensions("linear_fc2", 4096, 3584, 8192),
    ]


def test_valid_shapes_have_no_misfit():
    for recipe in ("tensorwise", "delayed", "blockwise", "mxfp8"):
        assert list(gemm_alignment_problems(config_of(precision__fp8_recipe=recipe))) == []


def test_each_misfit_names_the_padding_that_fixes_it():
    changes = {
        "model__hidden_size": 4088,
        "model__kv_channels": 4,
        "model__ffn_hidden_size": 14_328,
        "data__seq_length": 8190,
    }
    found = list(
        gemm_alignment_problems(config_of(**changes, precision__fp8_recipe="mxfp8", model__num_query_groups=1))
    )
    mends = ["--hidden-size 4096", "--kv-channels 32", "--ffn-hidden-size 14336", "--seq-length 8192"]
    assert len(found) == len(mends)
    for problem, mend in zip(found, mends, strict=True):
        assert mend in problem and "multiples of 32" in problem
    mended = {"model__hidden_size": 4096, "model__kv_channels": 32, "model__ffn_hidden_size": 14_336}
    assert (
        list(gemm_alignment_problems(config_of(**mended, precision__fp8_recipe="mxfp8", model__num_query_groups=1)))
        == []
    )


def test_rows_can_be_fixed_by_sequence_or_batch():
    config = config_of(data__seq_length=100, training__micro_batch_size=2)
    (problem,) = gemm_alignment_problems(config)
    assert "2 x 100 / 1 = 200 rows" in problem
    assert "--seq-length 104 or --micro-batch-size 4" in problem
    for mended in ({"data.seq_length": 104}, {"training.micro_batch_size": 4}):
        assert list(gemm_alignment_problems(with_values(config, mended))) == []


def test_sequence_shards_must_fit_too():
    config = config_of(
        data__seq_length=64,
        parallel__tensor_model_parallel_size=4,
        parallel__sequence_parallel=True,
        parallel__context_parallel_size=2,
    )
    (problem,) = gemm_alignment_problems(config)
    assert "1 x 64 / 8 = 8 rows" in problem and "--seq-length 128" in problem
