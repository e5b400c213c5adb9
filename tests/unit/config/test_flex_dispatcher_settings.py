"""What `--moe-token-dispatcher-type flex` asks of the other settings, of the machine, and of its packages.

NOT RUN with the real libraries, which need GPUs.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest
from device_targets import A100, CPU, H200

from megafp8.config import flags, rules
from megafp8.config.grouped_experts import grouped_expert_problems
from megafp8.config.mixture import exchange_library
from megafp8.config.rules.declared import unused_settings
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.device.capability import capability_problems
from megafp8.device.layer_support import exchange_library_problems
from megafp8.planning.mixture_time import exchanged_bytes

WORLD_SIZE = 4
RUN = (
    "--model-preset tiny-moe --bf16 --seq-length 128 --micro-batch-size 2 --global-batch-size 8 --train-iters 10 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --moe-shared-expert-intermediate-size 64"
)
FLEX = "--moe-token-dispatcher-type flex --expert-model-parallel-size 2"
HYBRID = f"{FLEX} --moe-flex-dispatcher-backend hybridep"
PADDED = "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"
TENSOR = "--moe-token-dispatcher-type flex --tensor-model-parallel-size 2 --sequence-parallel"


def config_of(words: str) -> RunConfig:
    return flags.parse(f"{RUN} {words}".split()).config


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (FLEX, None),
        (f"{FLEX} --moe-enable-deepep --moe-deepep-num-sms 24", None),
        (f"{FLEX} --moe-expert-capacity-factor 1", None),
        (f"{HYBRID} {PADDED} --moe-hybridep-num-sms 23", None),
        (TENSOR, None),
        (f"{TENSOR} --expert-tensor-parallel-size 1", "with one expert-parallel rank"),
        ("--moe-token-dispatcher-type flex", "with one expert-parallel rank"),
        (f"{FLEX} {PADDED}", "use --moe-flex-dispatcher-backend hybridep"),
        (f"{FLEX} --moe-router-dtype fp64", "DeepEP sends scores in FP32; use --moe-router-dtype fp32"),
        (f"{FLEX} --moe-flex-dispatcher-num-sms 23", "DeepEP needs an even number; use 24"),
        (f"{FLEX} --deterministic-mode", "same bits twice"),
        (f"{FLEX} --moe-shared-expert-overlap", "use alltoall"),
        (f"{FLEX} --moe-expert-kernels triton", "flex with expert-parallel ranks"),
        (f"{HYBRID} --moe-enable-deepep", "--moe-enable-deepep needs"),
        ("--moe-enable-deepep --moe-token-dispatcher-type alltoall", "--moe-enable-deepep needs"),
    ],
)
def test_settings_that_go_with_it(words: str, problem: str | None) -> None:
    found = rules.problems(config_of(words), WORLD_SIZE)
    assert len(found) == (problem is not None) and all(str(problem) in text for text in found), found


def test_tokens_are_sent_in_bf16() -> None:
    found = rules.problems(with_values(config_of(HYBRID), {"precision.bf16": False}), WORLD_SIZE)
    assert found == ["--moe-token-dispatcher-type flex: HybridEP sends tokens in BF16; give --bf16, or use alltoall"]


def test_its_options_do_nothing_with_another_dispatcher() -> None:
    words = "--moe-flex-dispatcher-backend hybridep --moe-hybridep-num-sms 8"
    warnings = list(unused_settings(config_of(f"{words} --moe-token-dispatcher-type alltoall")))
    assert len(warnings) == 2
    assert all(warning.endswith("has no effect without --moe-token-dispatcher-type flex") for warning in warnings)
    assert list(unused_settings(config_of(f"{words} {FLEX}"))) == []
    dense = flags.parse(["--moe-flex-dispatcher-backend", "hybridep"]).config
    (warning,) = unused_settings(dense)
    assert warning == "--moe-flex-dispatcher-backend hybridep has no effect without --moe-token-dispatcher-type flex"


def test_it_needs_a_gpu() -> None:
    config = config_of(FLEX)
    assert capability_problems(config, H200) == capability_problems(config, A100) == []
    (problem,) = capability_problems(config, CPU)
    assert problem == "--moe-token-dispatcher-type flex: cpu has no CUDA device; use alltoall"


def test_the_experts_are_transformer_engines() -> None:
    assert "--moe-token-dispatcher-type flex with expert-parallel ranks" in grouped_expert_problems(config_of(FLEX))


def test_a_token_is_sent_once_to_a_rank() -> None:
    alltoall = with_values(config_of(FLEX), {"parallel.moe_token_dispatcher_type": "alltoall"})
    # Of two experts of a token, with 2 of 4 on each rank, 1 is elsewhere on average; 5 of 6 tokens have one there.
    assert exchanged_bytes(config_of(FLEX)) == pytest.approx(exchanged_bytes(alltoall) * 5 / 6, abs=1)
    # All parts of the experts get every token: with two expert tensor-parallel ranks half of them is on the other.
    tokens = 128 * 2 // 2
    assert exchanged_bytes(config_of(TENSOR)) == 4 * tokens * 128 * 2


@pytest.mark.parametrize(("source", "missing"), [(None, 2), ("from .buffer import Buffer\n", 1), ("HybridEPBuffer", 1)])
def test_its_library_is_installed_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str | None, missing: int
) -> None:
    (tmp_path / "__init__.py").write_text(source or "")
    spec = importlib.machinery.ModuleSpec("deep_ep", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if source is None else spec)
    libraries = [exchange_library(config_of(words)) for words in (FLEX, HYBRID)]
    found = [problem for library in libraries for problem in exchange_library_problems(library)]
    assert len(found) == missing
    assert all("is not installed; build the package deep_ep" in each and "type alltoall" in each for each in found)
    assert exchange_library_problems(exchange_library(RunConfig())) == []
