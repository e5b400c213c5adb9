"""Parameter and FLOP counts, against published and measured figures."""

import pytest

from megafp8.config import dimensions, model_shapes
from megafp8.config.model_shapes import PRESETS
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values


def config_of(preset, **changes):
    values = {f"model.{name}": value for name, value in changes.items()}
    return with_values(RunConfig(), PRESETS[preset] | values)


def count(preset, **changes):
    config = config_of(preset, **changes)
    padded = dimensions.padded_vocab_size(config, config.model.vocab_size or 0)
    return model_shapes.count_parameters(config.model, padded)


@pytest.mark.parametrize(
    ("preset", "total"),
    [
        ("llama3.2-1b", 1_235_814_400),  # the published models
        ("llama3.2-3b", 3_212_749_824),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),  # the published model
        ("llama3-405b", 405_853_388_800),  # the published model
        ("qwen3-0.6b", 596_049_920),  # the published model
        ("llama-1b", 1_439_270_912),  # 1.439e9 in the measurements of this shape
        ("deepseek-v3", 671_026_404_352),  # the published model without multi-token prediction, 671B
        ("deepseek-v2-lite", 15_706_484_224),  # the published model
        ("gpt2-124m", 124_439_808 + (50_304 - 50_257) * 768),  # the published model, and padding
    ],
)
def test_totals(preset, total):
    assert count(preset).total == total


def test_latent_attention():
    assert count("deepseek-v3").active == pytest.approx(37.5e9, rel=0.01)  # published: 37B
    model = config_of("deepseek-v3").model
    # 61 layers x 128 heads x (192 query and 128 value channels) x 2 FLOPs x 2048 keys on average, three times
    attention = 3 * 61 * 128 * (192 + 128) * 2 * 2048
    flops = model_shapes.flops_per_token(model, 129_280, 4096)
    assert flops == pytest.approx(6 * count("deepseek-v3").active + attention)


def test_parts_add_up():
    parts = count("llama3-8b")
    assert parts.total == parts.num_layers * parts.per_layer + parts.final_norm + parts.embeddings
    assert parts.output_layer == parts.word_embeddings


def test_switches_change_the_expected_counts():
    base = count("gpt2-124m")
    assert count("gpt2-124m", add_bias_linear=False).biases_per_layer == 0
    assert count("gpt2-124m", add_bias_linear=False, add_qkv_bias=True).biases_per_layer == 3 * 768
    assert count("gpt2-124m", normalization="RMSNorm").total == base.total - 25 * 768
    assert count("gpt2-124m", qk_layernorm=True).total == base.total + 12 * 2 * 2 * 64
    assert count("gpt2-124m", position_embedding_type="rope").total == base.total - 1024 * 768
    assert count("gpt2-124m", share_embeddings_and_output_weights=False).total == base.total + 50_304 * 768


def test_flops_of_the_measured_shape():
    model = config_of("llama-1b").model
    assert model_shapes.flops_per_token(model, 50_304, 2048) == pytest.approx(9.240e9, rel=1e-4)


def test_flops_formula():
    model = config_of("gpt2-124m").model
    parameters = model_shapes.count_parameters(model, 50_304).total
    assert model_shapes.flops_per_token(model, 50_304, 1024) == 6 * parameters + 6 * 12 * 768 * 1024


def test_a_window_saves_attention():
    model = config_of("llama-1b").model
    windowed = config_of("llama-1b", window_size="511,0").model
    whole = config_of("llama-1b", window_size="2047,0").model
    full = model_shapes.flops_per_token(model, 50_304, 2048)
    assert model_shapes.flops_per_token(whole, 50_304, 2048) == full
    saved = full - model_shapes.flops_per_token(windowed, 50_304, 2048)
    assert saved == 6 * 24 * 2048 * (2048 - 2 * (512 - 512 * 512 / 4096))
