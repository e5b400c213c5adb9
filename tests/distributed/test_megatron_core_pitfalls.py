"""Errors of megatron-core that raise nothing, demonstrated here to justify the settings that avoid them.

Each test breaks a run in one way and observes the wrong result. A failing test means that megatron-core was fixed and
that the guard against the error can be removed. Overrides with the same effect are refused
(`unit/mcore/test_config.py`). A loss of two values instead of three would double gradients under context parallelism
(`unit/models/test_loss.py`).
"""

from __future__ import annotations

import re

import pytest
from ranks import run_ranks
from small_run import PLAIN, VIRTUAL, build_run, curve_of, fingerprint, small_config, train, weights
from tolerances import LAYOUT_GRAD_NORM, LAYOUT_LOSS

from megafp8.checkpoint.save import finish_param_gather
from megafp8.config.schema import RunConfig

SEQUENCE = "--tensor-model-parallel-size 2 --sequence-parallel"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"


def test_batched_p2p_of_two_interleaved_stages_mismatches() -> None:
    """Sends to the next and to the previous stage have the same peer, and are matched in the order of posting."""
    config = small_config("llama", f"{PLAIN} {VIRTUAL} --no-overlap-p2p-communication", 2)

    def batched() -> tuple[float, float]:
        run = build_run(config)
        assert run.transformer_config.batch_p2p_comm is False
        run.transformer_config.batch_p2p_comm = True
        curve = train(run, 2)
        return curve.losses[0], curve.grad_norms[0]

    loss, norm = run_ranks(2, batched)[0]
    right = run_ranks(2, curve_of, config, 1)[0]
    assert abs(loss - right.losses[0]) > 100 * LAYOUT_LOSS or norm > 2 * right.grad_norms[0]


def test_unmarked_norms_diverge_under_sequence_parallelism() -> None:
    """Each tensor-parallel rank then trains its norms on its own part of the sequence."""
    config = small_config("gpt2", f"{PLAIN} {SEQUENCE}", 2)

    def norms_after(is_marked: bool) -> str:
        run = build_run(config)
        for parameter in (parameter for chunk in run.training_state.chunks for parameter in chunk.parameters()):
            parameter.sequence_parallel = is_marked and getattr(parameter, "sequence_parallel", False)
        train(run, 3)
        return fingerprint({name: weight for name, weight in weights(run).items() if "norm" in name})

    assert len(set(run_ranks(2, norms_after, False))) == 2
    assert len(set(run_ranks(2, norms_after, True))) == 1


def test_gradient_norm_needs_marks_of_split_weights() -> None:
    """An unmarked split weight counts on one rank only. Initialization sets the marks and must not be skipped."""
    config = small_config("llama", f"{PLAIN} {SEQUENCE}", 2)

    def norm(is_marked: bool) -> float:
        run = build_run(config)
        for parameter in (parameter for chunk in run.training_state.chunks for parameter in chunk.parameters()):
            parameter.tensor_model_parallel = is_marked and getattr(parameter, "tensor_model_parallel", False)
        return train(run, 1).grad_norms[0]

    right = run_ranks(1, curve_of, small_config("llama", PLAIN), 1)[0].grad_norms[0]
    assert abs(run_ranks(2, norm, True)[0] / right - 1) < LAYOUT_GRAD_NORM["llama"]
    assert run_ranks(2, norm, False)[0] < 0.95 * right


def test_exactly_the_split_weights_are_marked() -> None:
    split = re.compile(r"(word_embeddings|output_layer|linear_(qkv|proj|fc1|fc2))\.weight|linear_(qkv|fc1)\.bias")
    for style in ("llama", "gpt2"):
        config = small_config(style, f"{PLAIN} {SEQUENCE}", 2)

        def marks(config: RunConfig = config) -> dict[str, bool]:
            chunk = build_run(config).training_state.chunks[0]
            return {name: getattr(p, "tensor_model_parallel", False) for name, p in chunk.named_parameters()}

        for name, is_marked in run_ranks(2, marks)[1].items():
            assert is_marked == bool(split.search(name)), name


def test_weight_gathers_are_pending_after_an_overlapped_update() -> None:
    """Code that reads weights between two steps must wait for them first, as `finish_param_gather` does."""
    config = small_config("llama", f"{PLAIN} {OVERLAP}", 2)

    def read() -> tuple[str, str]:
        run = build_run(config)
        train(run, 3)
        plain = {n: p.detach() for chunk in run.training_state.chunks for n, p in chunk.named_parameters()}
        early = fingerprint(plain)
        finish_param_gather(run.config.parallel, run.training_state)
        return early, fingerprint(plain)

    (early0, late0), (early1, late1) = run_ranks(2, read)
    assert early0 != early1
    assert late0 == late1


@pytest.mark.parametrize("padding", ["", "--moe-pad-expert-input-to-capacity"])
def test_experts_padded_to_their_capacity_keep_their_bias(padding: str) -> None:
    """The bias is updated from what the capacity leaves, and then every expert has as many tokens."""
    mixture = (
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-expert-capacity-factor 1.5"
    )
    config = small_config("llama", f"{PLAIN} {mixture} {padding}")

    def changes() -> bool:
        run = build_run(config)
        train(run, 2)
        biases = [
            each for chunk in run.training_state.chunks for name, each in chunk.named_buffers() if "expert_bias" in name
        ]
        assert len(biases) == 2
        return any(bool(bias.any()) for bias in biases)

    assert run_ranks(1, changes)[0] == (not padding)
