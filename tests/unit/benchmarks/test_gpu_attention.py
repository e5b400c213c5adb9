"""The content of the attention table, without a GPU."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import gpu_attention, gpu_gemm
from benchmarks.gpu_attention import Inputs, Shape, row_of, shape_of
from benchmarks.gpu_gemm import model_of
from megafp8.device.gpus import GPUS

SMALL = Shape("small", 16, 2, 4, 2, 8)


def test_a_rank_has_its_part_of_the_heads() -> None:
    text = "--model-preset llama3-8b --seq-length 4096 --micro-batch-size 2 --tensor-model-parallel-size 4"
    assert shape_of(model_of("8b", text.split(), GPUS["h200"])) == Shape("8b", 4096, 2, 8, 2, 128)


def test_the_models_flops_are_counted() -> None:
    shape = Shape("B", 4096, 2, 32, 8, 128)
    row = row_of(shape, "fused", "fused", [(1.0, 3.0), (2.0, 4.0), (9.0, 8.0)], 2**21, 0.0)
    assert (row.forward_ms, row.backward_ms, row.peak_mib) == (2.0, 4.0, 2.0)
    # 6 h s per token for forward and backward, a third of it forward.
    assert row.forward_tflops == row.backward_tflops == pytest.approx(2 * 4096 * 4096 * 8192 / 2e-3 / 1e12)


def test_torch_attention_is_causal_and_grouped() -> None:
    inputs = Inputs(SMALL, torch.device("cpu"))
    whole = gpu_attention.sdpa(inputs.query, inputs.key, inputs.value)
    assert whole.shape == inputs.gradient.shape
    half = gpu_attention.sdpa(*(x[:8] for x in (inputs.query, inputs.key, inputs.value)))
    torch.testing.assert_close(whole[:8], half)
    assert gpu_attention.relative_error(whole[:, :1].detach(), inputs.expected()) < 1e-2
    assert gpu_attention.relative_error(whole[:, 1:].detach(), inputs.expected()) > 0.1


def test_documents_have_the_flops_of_each() -> None:
    shape = replace(SMALL, ends=(0, 4, 16, 32))
    assert shape.forward_flops == 2 * 4 * 8 * (4**2 + 12**2 + 16**2)
    assert SMALL.forward_flops == 2 * 4 * 8 * 2 * 16**2
    inputs = Inputs(shape, torch.device("cpu"))
    first = [x[:4, :1].float() for x in (inputs.query, inputs.key, inputs.value)]
    torch.testing.assert_close(inputs.expected()[:4], gpu_attention.sdpa(*first))
    torch.testing.assert_close(inputs.expected()[4], inputs.value[4, 0].float().repeat_interleave(2, 0).view(1, -1))


def test_documents_of_a_benchmark_have_room_for_more() -> None:
    shape = Shape("B", 32768, 1, 32, 8, 128).in_documents(2048)
    assert shape.ends[0] == 0 and shape.ends[-1] == 32768 and 8 < len(shape.ends) < 32
    assert shape.with_room("fused")[:2] == ["fused 32 documents", "fused 64 documents"]
    assert SMALL.in_documents(4).ends.count(16) == 1, "no document has tokens of two sequences"


def test_a_backend_without_its_library_is_named() -> None:
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("for machines without Transformer Engine")
    with pytest.raises(gpu_attention.NotHere, match="needs Transformer Engine"):
        gpu_attention.attention_of(SMALL, "fused")


@pytest.mark.parametrize("parse", [gpu_gemm.parse, gpu_attention.parse])
def test_models_are_shapes_and_flags(parse) -> None:
    options = parse(["--rounds", "3", "--shapes", "A", "B", "--", "--model-preset", "llama3-8b"])
    assert options.rounds == 3 and list(options.models) == ["A", "B", "--model-preset llama3-8b"]
    assert model_of("A", options.models["A"], GPUS["h200"]).run.config.model.hidden_size
    with pytest.raises(SystemExit):
        parse([])


def test_plain_attention_is_torchs() -> None:
    inputs = Inputs(SMALL, torch.device("cpu"))
    plain = gpu_attention.plain(inputs.query, inputs.key, inputs.value)
    torch.testing.assert_close(plain, gpu_attention.sdpa(inputs.query, inputs.key, inputs.value), atol=2e-2, rtol=2e-2)
