"""Text from a checkpoint: the right model, the right position, complete characters, clear errors."""

import dataclasses

import pytest
import torch
from ranks import run_ranks
from saved_run import STEP, build_initial, configure, save_initial

from megafp8.checkpoint.directory import find_checkpoint
from megafp8.checkpoint.load import load_weights
from megafp8.checkpoint.metadata import read_config
from megafp8.config.layer_backends import EMULATED, TRANSFORMER_ENGINE
from megafp8.config.rules.precision import uses_split_rope_kernel
from megafp8.config.schema import RunConfig
from megafp8.device.capability import TARGETS
from megafp8.errors import CapabilityError, CheckpointError, DataError
from megafp8.models.layer_specs import Norm
from megafp8.training.generation import TextStream, generate_ids, generate_text
from megafp8.training.generation_precision import without_quantization
from megafp8.training.language_model import load_language_model, single_device_config
from megafp8.training.sampling import GREEDY, Sampling

FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
PROMPT = [5, 3, 250, 8]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A run in FP8 with optimizer state."""
    return save_initial(tmp_path_factory.mktemp("llama"), configure(f"--model-preset tiny --vocab-size 300 {FP8}"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A run in FP32 with learned positions."""
    return save_initial(
        tmp_path_factory.mktemp("gpt2"),
        configure(
            "--model-preset tiny-gpt2 --vocab-size 300 --max-position-embeddings 32 --no-save-optim "
            "--untie-embeddings-and-output-weights"  # tied, an untrained model repeats itself
        ),
    )


def with_model(function, folder, **options):
    """`function(model)` in a separate process."""

    def call():
        return function(load_language_model(folder, **options))

    return run_ranks(1, call)[0]


def test_greedy_is_the_argmax_of_one_forward_pass_over_the_result(gpt2) -> None:
    def check(model):
        model.tokenizer.eod = -1
        new = list(generate_ids(model, PROMPT, GREEDY, 20, seed=1))
        tokens = torch.tensor([PROMPT + new])
        with torch.no_grad():
            logits = model.module(tokens, torch.arange(tokens.shape[1])[None], None)
        return new, logits[0, len(PROMPT) - 1 : -1, : model.tokenizer.vocab_size].argmax(-1).tolist()

    new, expected = with_model(check, gpt2)
    assert new == expected
    assert len(set(new)) > 5, "a constant text would prove little"


def test_greedy_in_fp8_is_the_argmax_of_a_forward_pass_over_each_prefix(llama) -> None:
    def check(model):
        model.tokenizer.eod = -1
        ids = list(PROMPT)
        for _ in range(12):  # no codes are kept between passes here
            ids.append(int(model.next_logits(ids).argmax()))
        return list(generate_ids(model, PROMPT, GREEDY, 12, seed=1)), ids[len(PROMPT) :]

    new, expected = with_model(check, llama, uses_cache=False)
    assert new == expected


def test_high_precision_generation_uses_no_fp8(llama) -> None:
    def logits(model):
        return str(model), model.next_logits(PROMPT)

    fp8_text, fp8 = with_model(logits, llama, uses_cache=False)
    high_text, high = with_model(logits, llama, uses_cache=False, precision="high")
    assert "FP8 hybrid tensorwise" in fp8_text
    assert "FP8" not in high_text
    relative = ((fp8 - high).norm() / high.norm()).item()
    assert 1e-3 < relative < 0.2


def test_a_model_that_ended_in_high_precision_generates_in_it(tmp_path) -> None:
    """Step 7 is saved."""
    for schedule, name in (("fp8:6,bf16", None), ("bf16:6,fp8", "hybrid")):
        run = configure(f"--model-preset tiny --vocab-size 300 --bf16 {FP8} --fp8-schedule {schedule} --no-save-optim")
        folder = save_initial(tmp_path / schedule, run)
        assert with_model(lambda model: model.config.precision.fp8_format, folder, uses_cache=False) == name


def test_equal_seeds_give_equal_text_and_different_seeds_do_not(llama) -> None:
    def texts(model):
        return [generate_text(model, "5 3", Sampling(), 12, seed, shown.append).text for seed in (1, 1, 2)]

    shown: list[str] = []
    first, same, other = with_model(texts, llama)
    assert first == same
    assert first != other


def test_top_k_of_one_is_greedy_at_any_temperature(llama) -> None:
    def pair(model):
        samplings = (GREEDY, Sampling(temperature=5.0, top_k=1))
        return [list(generate_ids(model, PROMPT, sampling, 8, seed=3)) for sampling in samplings]

    greedy, hot = with_model(pair, llama)
    assert greedy == hot


def test_a_window_slides_when_the_text_is_longer_than_the_context(gpt2) -> None:
    def check(model):
        ids = [(7 * i) % 300 for i in range(50)]
        new = list(generate_ids(model, ids, GREEDY, 3, seed=1))
        return model.context_tokens, model.next_logits(ids).equal(model.next_logits(ids[-32:])), len(new)

    assert with_model(check, gpt2) == (32, True, 3)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_lengths_padded_for_the_gemms_read_the_last_token(gpt2, length) -> None:
    def check(model):
        ids = [(7 * i) % 300 for i in range(length)]
        plain, padded = model.next_logits(ids), dataclasses.replace(model, length_multiple=16).next_logits(ids)
        return (padded - plain).abs().max().item(), plain.std().item()

    difference, spread = with_model(check, gpt2)
    assert difference < 1e-5 * spread


def test_the_end_of_the_document_ends_the_text(llama) -> None:
    def check(model):
        third = list(generate_ids(model, PROMPT, GREEDY, 3, seed=1))[2]
        model.tokenizer.eod = third
        sample = generate_text(model, " ".join(map(str, PROMPT)), GREEDY, 20, 1, pieces.append)
        return sample, "".join(pieces)

    pieces: list[str] = []
    sample, shown = with_model(check, llama)
    assert sample.ended_by == "eod"
    assert sample.num_tokens == len(sample.text.split()) == 2
    assert shown == sample.text


def test_an_empty_prompt_starts_a_document(llama) -> None:
    def check(model):
        ids = list(generate_ids(model, [model.tokenizer.eod], GREEDY, 4, seed=1))
        return generate_text(model, "", GREEDY, 4, 1, len), ids

    sample, ids = with_model(check, llama)
    assert [int(word) for word in sample.text.split()] == ids


def test_padding_of_the_vocabulary_is_never_drawn(llama) -> None:
    assert with_model(lambda model: tuple(model.next_logits(PROMPT).shape), llama) == (301,)


def test_a_prompt_with_tokens_of_another_vocabulary_is_refused(llama) -> None:
    with pytest.raises(AssertionError) as caught:
        with_model(lambda model: generate_text(model, "5 301", GREEDY, 1, 1, len), llama)
    assert isinstance(caught.value.__cause__, DataError)
    assert "has token 301; the model has 0 to 300" in str(caught.value)


def test_a_checkpoint_of_two_tensor_parallel_ranks_gives_their_logits(tmp_path) -> None:
    """The embedding is padded to 512 rows for two ranks, where one rank alone would have 384."""
    config = configure(
        "--model-preset tiny --vocab-size 300 --tensor-model-parallel-size 2 --sequence-parallel --no-save-optim"
    )
    save_initial(tmp_path, config, world_size=2)
    ids = PROMPT * 2

    def forward():
        model = build_initial(config).chunks[0].eval()
        with torch.no_grad():
            return model(torch.tensor([ids]), torch.arange(len(ids))[None], None)[0, -1]

    expected = torch.cat(run_ranks(2, forward))
    assert expected.shape == (512,)
    found = with_model(lambda model: model.next_logits(ids), tmp_path)
    torch.testing.assert_close(found, expected[:301], rtol=1e-5, atol=1e-5)


def test_state_of_other_layer_types_is_not_required(gpt2) -> None:
    """Like the state of Transformer Engine's norms, with a checkpoint of a CPU run."""

    def compare():
        Norm.get_extra_state = lambda self: torch.zeros(1, dtype=torch.uint8)
        Norm.set_extra_state = lambda self, state: None
        model = load_language_model(gpt2)
        names = [name for name in model.module.state_dict() if "norm" in name and name.endswith("_extra_state")]
        return len(names), model.next_logits(PROMPT)

    num_states, logits = run_ranks(1, compare)[0]
    assert num_states == 5
    assert logits.equal(with_model(lambda model: model.next_logits(PROMPT), gpt2))


def test_a_weight_that_is_not_in_the_checkpoint_is_named(gpt2) -> None:
    path = find_checkpoint(gpt2)[1]
    config = read_config(path)
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, qk_layernorm=True))
    with pytest.raises(
        AssertionError, match="is a checkpoint of a different model: it lacks .*q_layernorm.weight"
    ) as caught:
        run_ranks(1, lambda: load_weights(path, build_initial(other).chunks))
    assert isinstance(caught.value.__cause__, CheckpointError)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def detokenize(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


def test_text_is_emitted_in_complete_characters() -> None:
    stream = TextStream(Bytes(), list("é".encode()))
    pieces = [stream.add(byte) for byte in "a→🙂b".encode()]
    assert pieces == ["a", "", "", "→", "", "", "", "🙂", "b"]
    assert stream.finish() == ""
    assert stream.text == "a→🙂b"


def test_invalid_bytes_are_emitted_once_known() -> None:
    stream = TextStream(Bytes(), [])
    assert [stream.add(byte) for byte in (0xE2, 0x86, ord("x"), 0xF0)] == ["", "", "\ufffdx", ""]
    assert stream.finish() == "\ufffd"


def test_a_missing_checkpoint_error_names_the_flag(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=f"--load {tmp_path} holds no checkpoint"):
        load_language_model(tmp_path)


def test_a_missing_step_lists_the_existing_ones(llama) -> None:
    with pytest.raises(CheckpointError, match=f"--ckpt-step 8: .* has steps: {STEP}"):
        load_language_model(llama, step=8)


def saved(**precision) -> RunConfig:
    config = configure("--model-preset tiny --vocab-size 300 --tensor-model-parallel-size 2 --sequence-parallel --bf16")
    return dataclasses.replace(config, precision=dataclasses.replace(config.precision, **precision))


def test_a_run_of_a_gpu_cluster_generates_on_a_cpu() -> None:
    there = saved(
        transformer_impl="transformer_engine", attention_backend="flash", fp8_param_gather=True,
        fp8_format="hybrid", fp8_recipe="tensorwise",
    )  # fmt: skip
    config, implementation = single_device_config(there, TARGETS["cpu"])
    assert implementation is EMULATED
    assert config.precision.fp8_recipe == "tensorwise"
    assert config.parallel.tensor_model_parallel_size == 1
    assert config.precision.quantize_kernels is None
    config, implementation = single_device_config(there, TARGETS["h200"])
    assert (implementation, config.precision.quantize_kernels) == (TRANSFORMER_ENGINE, "te")


def test_keys_are_rotated_by_megatron_core_which_caches_them_before() -> None:
    config, implementation = single_device_config(saved(transformer_impl="transformer_engine"), TARGETS["h200"])
    assert implementation is TRANSFORMER_ENGINE
    assert not uses_split_rope_kernel(config)


def test_a_mixture_drops_no_tokens_and_adds_no_noise() -> None:
    there = configure(
        "--model-preset tiny-moe --vocab-size 300 --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1 "
        "--moe-pad-expert-input-to-capacity --moe-token-drop-policy position --moe-input-jitter-eps 0.1"
    )
    expected = configure("--model-preset tiny-moe --vocab-size 300").model
    assert single_device_config(there, TARGETS["cpu"])[0].model == expected


def test_layer_implementation_is_kept_where_it_runs() -> None:
    for layers in ("emulated", "local"):
        assert single_device_config(saved(transformer_impl=layers), TARGETS["h200"])[1].name == layers


def test_a_cache_has_the_layers_whose_attention_needs_no_plan_for_each_length() -> None:
    there = without_quantization(saved(transformer_impl="transformer_engine"))
    assert single_device_config(there, TARGETS["h200"], uses_cache=True)[1] is EMULATED
    windowed = dataclasses.replace(there, model=dataclasses.replace(there.model, window_size="7,0"))
    assert single_device_config(windowed, TARGETS["h200"], uses_cache=True)[1] is EMULATED


def test_settings_that_only_emulation_has_keep_emulation() -> None:
    there = saved(fp8_format="hybrid", fp8_recipe="tensorwise", fp8_power_2_scale=True)
    config, implementation = single_device_config(there, TARGETS["h200"])
    assert implementation is EMULATED
    assert config.precision.fp8_power_2_scale


def test_an_unsupported_recipe_suggests_high_precision() -> None:
    there = saved(fp8_format="hybrid", fp8_recipe="mxfp8", emulation=False)
    with pytest.raises(CapabilityError, match="--precision high"):
        single_device_config(there, TARGETS["h100"])
    config, _ = single_device_config(without_quantization(there), TARGETS["h100"])
    assert config.precision.fp8_format is None
