"""Text with a key-value cache is the text without it, in FP32 and to the token."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from ranks import run_ranks
from saved_run import configure, save_initial
from tolerances import TRANSFORMERS_LOGITS

from megafp8.device.platform import Platform
from megafp8.training.generation import generate_ids, generate_text
from megafp8.training.language_model import LanguageModel, load_language_model
from megafp8.training.sampling import GREEDY, Sampling

CONTEXT = 32
COMMON = "--vocab-size 300 --no-save-optim --untie-embeddings-and-output-weights"  # tied, an untrained model repeats
LLAMA = f"--model-preset tiny {COMMON}"
GPT2 = f"--model-preset tiny-gpt2 --max-position-embeddings {CONTEXT} {COMMON}"
MODELS = {
    "rope, swiglu": LLAMA,
    "rope of half a head, interleaved": f"{LLAMA} --rotary-percent 0.5 --rotary-interleaved",
    "rope, one key-value head": f"{LLAMA} --group-query-attention --num-query-groups 1",
    "rope, q and k layernorm": f"{LLAMA} --qk-layernorm",
    "rope, windows in half of the layers": f"{LLAMA} --window-size 5,0 --window-attn-skip-freq 2",
    "rope in half of the layers": f"{LLAMA} --no-rope-freq 2 --qk-l2-norm",
    "yarn": (
        f"{LLAMA} --position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8"
    ),
    "multi-latent attention": (
        f"{GPT2} --position-embedding-type rope --multi-latent-attention --q-lora-rank 48 --kv-lora-rank 32 "
        "--qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 24 --qk-layernorm --rotary-scaling-factor 4 "
        "--yarn-original-max-position-embeddings 8"
    ),
    "learnable offsets of the softmax": f"{LLAMA} --softmax-type learnable --window-size 9,0",
    "capped attention and logits": f"{LLAMA} --attention-logit-softcapping 2 --output-logit-softcapping 0.5",
    "documents": f"{LLAMA} --reset-attention-mask",
    "learned positions, gelu": GPT2,
    "learned positions, two key-value heads": f"{GPT2} --group-query-attention --num-query-groups 2",
}
PROMPTS = ([17], [5, 3, 250, 8], [(7 * i) % 300 for i in range(21)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in FP32."""
    return save_initial(tmp_path_factory.mktemp("run"), configure(LLAMA))


def load(folder: Path) -> LanguageModel:
    """The model without an end of the document."""
    model = load_language_model(folder)
    model.tokenizer.eod = -1
    return model


def without_cache(model: LanguageModel) -> LanguageModel:
    return dataclasses.replace(model, uses_cache=False)


def greedy(model: LanguageModel, prompt: list[int], num_tokens: int) -> list[int]:
    return list(generate_ids(model, prompt, GREEDY, num_tokens, seed=1))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_without_a_cache(name: str, tmp_path: Path) -> None:
    """The longest text ends beyond the context window, where it slides."""
    save_initial(tmp_path, configure(MODELS[name]))

    def texts() -> tuple[list[list[int]], list[list[int]]]:
        model = load(tmp_path)
        assert model.context_tokens == CONTEXT
        models = model, without_cache(model)
        return tuple([greedy(model, prompt, CONTEXT // 2) for prompt in PROMPTS] for model in models)

    cached, plain = run_ranks(1, texts)[0]
    assert cached == plain
    assert min(len(set(text)) for text in plain) > 5, "a constant text would prove little"


def test_each_token_is_one_pass_over_itself_until_the_window_slides(folder: Path) -> None:
    def passes() -> list[int]:
        model, lengths = load(folder), []
        model.module.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
        greedy(model, list(range(CONTEXT - 5)), 9)
        return lengths

    assert run_ranks(1, passes)[0] == [CONTEXT - 5, 1, 1, 1, 1, 1, CONTEXT, CONTEXT, CONTEXT]


def test_a_prompt_longer_than_the_window_is_its_last_tokens(folder: Path) -> None:
    prompt = [(7 * i) % 300 for i in range(50)]

    def texts() -> tuple[list[int], list[int], list[int]]:
        model = load(folder)
        return greedy(model, prompt, 3), greedy(without_cache(model), prompt, 3), greedy(model, prompt[-CONTEXT:], 3)

    cached, plain, cut = run_ranks(1, texts)[0]
    assert cached == plain == cut


def test_logits_are_those_without_a_cache_to_rounding(folder: Path) -> None:
    def compare() -> tuple[float, float]:
        model, ids = load(folder), PROMPTS[2]
        cache = model.build_cache()
        model.next_logits(ids[:9], cache)
        differences = [
            (model.next_logits(ids[:end], cache) - model.next_logits(ids[:end])).abs().max().item()
            for end in range(10, len(ids) + 1)
        ]
        return max(differences), model.next_logits(ids).abs().max().item()

    difference, largest = run_ranks(1, compare)[0]
    assert difference < TRANSFORMERS_LOGITS * largest  # the same: other summation orders in FP32


def test_samples_do_not_share_a_cache(folder: Path) -> None:
    def texts() -> list[str]:
        model = load(folder)
        return [generate_text(model, "5 3", Sampling(), 12, seed, len).text for seed in (1, 2, 1)]

    first, other, again = run_ranks(1, texts)[0]
    assert first == again != other


def test_a_quantized_bf16_run_generates_in_fp32_where_bf16_is_emulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are BF16 numbers, which FP32 holds exactly."""
    save_initial(tmp_path, configure(f"{LLAMA} --bf16 --fp8-format hybrid --fp8-recipe tensorwise"))

    def text(has_bf16_units: bool) -> tuple[str, str, bool, int]:
        monkeypatch.setattr(Platform, "has_bf16_units", lambda self: has_bf16_units)
        model = load(tmp_path)
        weights = [weight.float() for weight in model.module.parameters()]
        is_bf16 = all(weight.bfloat16().float().equal(weight) for weight in weights)
        return str(model), model.warning, is_bf16, len(greedy(model, [5, 3], 4))

    shown, warning, is_bf16, num_tokens = run_ranks(1, text, True)[0]
    assert "layers, bf16, key-value cache, on cpu" in shown
    assert "trained in FP8 hybrid tensorwise; the key-value cache generates in bf16. --no-cache" in warning
    assert is_bf16 and num_tokens == 4
    shown, warning, is_bf16, num_tokens = run_ranks(1, text, False)[0]
    assert "layers, fp32, key-value cache, on cpu" in shown
    assert "generates in fp32, since this device emulates bf16" in warning
    assert is_bf16 and num_tokens == 4
