"""What `--use-torch-fsdp2` excludes, and the sizes that its ranks divide."""

import pytest

from megafp8.config import flags, rules

RUN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 255 --make-vocab-size-divisible-by 16 --tokenizer-type NullTokenizer --mock-data "
    "--micro-batch-size 1 --global-batch-size 24 --train-iters 10 --lr 1e-3"
)
FSDP = "--use-torch-fsdp2"


def problems(words: str, world_size: int = 2) -> list[str]:
    return rules.problems(flags.parse(f"{RUN} {words}".split()).config, world_size)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--use-distributed-optimizer", "--use-distributed-optimizer is not supported"),
        ("--overlap-grad-reduce", "--overlap-grad-reduce is not supported"),
        ("--pipeline-model-parallel-size 2", "use tensor parallelism"),
        ("--num-experts 4", "groups of their own"),
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-log-interval 5", "quantization statistics"),
        ("--check-weight-hash-across-dp-replicas-interval 5", "no replicas"),
        (
            "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --use-transformer-engine-op-fuser",
            "fused operations quantize",
        ),
    ],
)
def test_other_settings_are_refused(words: str, text: str) -> None:
    world_size = 4 if "pipeline" in words else 2
    assert any(text in problem for problem in problems(f"{words} {FSDP}", world_size))
    assert not any(text in problem for problem in problems(words, world_size))


def test_weights_and_gradients_may_be_sent_as_codes() -> None:
    codes = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --grad-reduce-in-fp8"
    assert problems(f"{codes} {FSDP}") == []


def test_sums_in_another_dtype_are_those_of_replicas() -> None:
    codes = f"--bf16 --grad-reduce-in-fp8 {FSDP}"
    for intra in ("fp8", "bf16", "fp32"):
        words = f"{codes} --grad-reduce-fp8-intra-node {intra}"
        assert problems(f"{words} --num-distributed-optimizer-instances 2", 4) == []
        single = problems(words, 4)
        assert ["use --num-distributed-optimizer-instances N" in each for each in single] == [True] * (intra != "fp8")


def test_state_in_low_precision_is_refused_with_its_reason() -> None:
    level = problems(f"--fp8-lm-level O2 {FSDP}")
    assert [each.split()[0] for each in level] == ["--use-precision-aware-optimizer", "--use-distributed-optimizer"]
    assert all("--fp8-lm-level O2 sets" in each and "use --fp8-lm-level O1" in each for each in level)
    off = "--no-use-precision-aware-optimizer --no-use-distributed-optimizer"
    assert problems(f"--fp8-lm-level O2 {off} {FSDP}") == []
    (state,) = problems(f"--bf16 --use-precision-aware-optimizer {FSDP} --no-use-distributed-optimizer")
    assert state.startswith(f"--use-precision-aware-optimizer is not supported with {FSDP}")
    for replicas in ("", "--num-distributed-optimizer-instances 2"):
        assert problems(f"--fp8-lm-level O1 {FSDP} {replicas}", 4) == []


def test_replicas_divide_the_ranks() -> None:
    replicas = f"{FSDP} --num-distributed-optimizer-instances"
    assert problems(f"{replicas} 2", 4) == []
    assert "4 data- x context-parallel ranks are not 3 replicas" in problems(f"{replicas} 3", 4)[0]
    assert "two or more: use another number of replicas" in problems(f"{replicas} 4", 4)[0]
    assert any("instances 0" in problem for problem in problems(f"{replicas} 0", 4))
    assert problems("--num-distributed-optimizer-instances 2", 4) == []


def test_number_formats_and_a_flag_without_effect() -> None:
    assert not problems(FSDP) and not problems(f"{FSDP} --fp16") and not problems(f"{FSDP} --bf16 --loss-scale 8")
    assert "has no effect" in problems("--torch-fsdp2-no-reshard-after-forward")[0]


def test_ranks_divide_the_rows() -> None:
    assert "nothing to shard" in problems(FSDP, 1)[0]
    assert "do not divide hidden size 64" in problems(FSDP, 3)[0]
    assert "must be even, not 3" in problems(f"{FSDP} --swiglu --hidden-size 96 --ffn-hidden-size 96", 3)[-1]
    assert any("vocabulary multiple" in each for each in problems(f"{FSDP} --make-vocab-size-divisible-by 15"))
    assert any("query or key norm (15)" in each for each in problems(f"{FSDP} --qk-layernorm --kv-channels 15"))
