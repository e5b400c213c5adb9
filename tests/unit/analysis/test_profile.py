"""How a profile's kernels are grouped and summed, and read from a trace, without a GPU."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from traces import STEPS, event, write

from megafp8.analysis.profile import KernelEvent, OperatorEvent, Profile, part_of, read_trace
from megafp8.errors import DataError


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64", "GEMM FP8"),
        ("nvjet_sm90_qrtst_128x160_128x5_1x2_h_bz_coopA_algo2_TNT", "GEMM FP8"),
        ("cast_transpose_optimized_kernel(__nv_bfloat16 const*, __nv_fp8_e5m2*)", "quantize"),
        ("void transformer_engine::dgated_act_kernel<16, true, float>", "SwiGLU"),
        ("rotate_back_and_join_kernel", "rope, QKV split"),
        ("swiglu_backward_kernel", "SwiGLU"),
        ("unrolled_elementwise_kernel<CUDAFunctor_add<float>, memory::LoadWithCast<2>>", "copy, cat, add"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN", "GEMM BF16"),
        ("void transformer_engine::cast_transpose_fused_kernel_notaligned<...>", "quantize"),
        ("void transformer_engine::multi_tensor_adam::adam_kernel", "optimizer"),
        ("adam_kernel", "optimizer"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("quantize_blocks_kernel", "quantize"),
        ("cast_kernel", "quantize"),
        ("decode_tensor_kernel", "quantize"),
        ("finish_product_kernel", "quantize"),
        ("void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<...>", "copy, cat, add"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel", "norm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "fill"),
    ],
)
def test_kernels_are_classified_by_name(name: str, part: str) -> None:
    assert part_of(name) == part


def test_overlapping_kernels_count_once() -> None:
    profile = Profile(
        [KernelEvent("a", 0, 1000), KernelEvent("b", 500, 1000), KernelEvent("adam_kernel", 2000, 3000)], steps=2
    )
    assert profile.span_ms() == 2.5
    assert profile.busy_ms() == 2.25
    assert profile.rows() == [("optimizer", 1.5, 0.5), ("other", 1.0, 1.0)]


def test_communication_beside_other_kernels_is_not_exposed() -> None:
    reduce = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"
    kernels = [KernelEvent("gemm", 0.0, 1000.0), KernelEvent(reduce, 500.0, 1000.0), KernelEvent("gemm", 2000.0, 500.0)]
    assert Profile(kernels, steps=1).exposed_ms() == 0.5
    assert Profile(kernels[:1], steps=1).exposed_ms() == 0
    assert Profile(kernels[1:2], steps=1).exposed_ms() == 1


def test_gaps_are_attributed_to_adjacent_kernels() -> None:
    kernels = [
        KernelEvent("a", 0, 1000),
        KernelEvent("b", 100, 200),
        KernelEvent("c", 1500, 500),
        KernelEvent("a", 3000, 500),
    ]
    assert Profile(kernels, steps=2).gaps() == [("c", "a", 0.5, 0.5), ("a", "c", 0.25, 0.5)]


def test_a_trace_has_the_kernels_copies_and_number_of_steps(tmp_path: Path) -> None:
    events = [
        event("adam_kernel", 3000.5, 100), event("Memcpy HtoD", 3200, 50, "gpu_memcpy"),
        event("adam_kernel", 4000, 30), event("optimizer", 3000, 900, "gpu_user_annotation"),
        event("aten::add", 3000, 10, "cpu_op"), {"ph": "f", "name": "ac2g"},
    ]  # fmt: skip
    path = write(tmp_path / "rank0.json", *STEPS, *events)
    trace = read_trace(path)
    assert (trace.has_kernels, trace.has_steps, trace.profile.steps) == (True, True, 2)
    assert trace.profile.rows() == [("optimizer", 0.065, 1.0), ("copy, cat, add", 0.025, 0.5)]
    packed = tmp_path / "rank0.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_trace(packed) == trace
    assert not read_trace(write(path, *events)).has_steps


def test_gemms_are_of_the_range_of_their_stream(tmp_path: Path) -> None:
    fp8, bf16 = "nvjet_sm90_qrtst_128x160_128x5_1x2_h_bz_coopA_algo2_TNT", "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN"
    annotation = "gpu_user_annotation"
    events = [
        event("layers.0.linear_fc1 fprop", 3000, 100, annotation), event("cast_kernel", 3000, 40),
        event(fp8, 3040, 60), event(fp8, 3100, 7),  # begins at the end: outside
        event("layers.0.linear_fc1 backward", 3200, 300, annotation),
        event("layers.0.linear_fc1 wgrad", 3400, 100, annotation), event(bf16, 3400, 100),
        event("layers.0.linear_fc1 dgrad", 3300, 50, annotation), event(fp8, 3310, 40),
        event(fp8, 3320, 10, thread=2), event(fp8, 3360, 10),  # another stream, and between two ranges
    ]  # fmt: skip
    profile = read_trace(write(tmp_path / "rank0.json", *STEPS, *events)).profile
    assert profile.gemm_rows() == [
        ("GEMM BF16 wgrad", 0.05, 0.5), ("GEMM FP8 fprop", 0.03, 0.5), ("GEMM FP8 dgrad", 0.02, 0.5),
    ]  # fmt: skip
    assert {part: ms for part, ms, _ in profile.rows()}["GEMM FP8"] == pytest.approx(0.0635)


def test_without_kernels_the_outermost_operators_of_each_thread_count(tmp_path: Path) -> None:
    events = [
        event("aten::linear", 3000, 100, "cpu_op"), event("aten::addmm", 3000, 90, "cpu_op"),
        event("aten::silu", 3050, 200, "cpu_op", thread=2), event("aten::mm", 3100, 50, "cpu_op"),
        event("aten::mm", 9000, 50, "cpu_op"),  # after the profiled steps
    ]  # fmt: skip
    trace = read_trace(write(tmp_path / "trace.json", *STEPS, *events))
    assert not trace.has_kernels
    operators = [
        OperatorEvent("aten::linear", 3000, 100),
        OperatorEvent("aten::silu", 3050, 200),
        OperatorEvent("aten::mm", 3100, 50),
    ]
    assert trace.profile.kernels == operators
    assert trace.profile.rows() == [("SwiGLU", 0.1, 0.5), ("GEMM", 0.075, 1.0)]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not JSON"),
        (b"[1]", "not a trace of torch.profiler, or damaged"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 0}]}', "KeyError: 'dur'"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": "x", "dur": 1}]}', "ValueError"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": [], "ts": 0, "dur": 1}]}', "TypeError: name []"),
        (b'{"traceEvents": []}', "no kernels of a GPU and no operators of a CPU"),
        (gzip.compress(b'{"traceEvents": []}')[:-9], "truncated"),
        (b"\x1f\x8bgarbage", "not gzip"),
    ],
)
def test_a_damaged_trace_is_refused_with_its_path(content: bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"rank0\.json: ") as raised:
        read_trace(path)
    assert text in str(raised.value)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none.json"):
        read_trace(tmp_path / "none.json")
