"""How a profile's kernels are grouped and summed, without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.gpu_profile import Kernel, Profile, group_of


@pytest.mark.parametrize(
    ("name", "group"),
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
def test_kernels_are_classified_by_name(name: str, group: str) -> None:
    assert group_of(name) == group


def test_overlapping_kernels_count_once() -> None:
    profile = Profile([Kernel("a", 0, 1000), Kernel("b", 500, 1000), Kernel("adam_kernel", 2000, 3000)], steps=2)
    assert profile.span_ms() == 2.5
    assert profile.busy_ms() == 2.25
    assert profile.rows() == [("optimizer", 1.5, 0.5), ("other", 1.0, 1.0)]


def test_communication_beside_other_kernels_is_not_exposed() -> None:
    reduce = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"
    kernels = [Kernel("gemm", 0.0, 1000.0), Kernel(reduce, 500.0, 1000.0), Kernel("gemm", 2000.0, 500.0)]
    assert Profile(kernels, steps=1).exposed_ms() == 0.5
    assert Profile(kernels[:1], steps=1).exposed_ms() == 0
    assert Profile(kernels[1:2], steps=1).exposed_ms() == 1


def test_gaps_are_attributed_to_adjacent_kernels() -> None:
    kernels = [Kernel("a", 0, 1000), Kernel("b", 100, 200), Kernel("c", 1500, 500), Kernel("a", 3000, 500)]
    assert Profile(kernels, steps=2).gaps() == [("c", "a", 0.5, 0.5), ("a", "c", 0.25, 0.5)]
