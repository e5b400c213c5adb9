"""A bare megatron-core training loop on one GPU with its fastest settings: the baseline of the benchmarks.

The same shapes, dtypes and random tokens as `gpu_steps.py`; Transformer Engine's fused operations, fused loss, fused
rotary embedding, overlapped reductions, FP32 gradients accumulated in the GEMM. Mixtures (M1 to M3) have its grouped
GEMM, its permute and router kernels, tokens padded in the router for FP8, and no fused operations, which are for dense
layers. NOT RUN with mixtures yet.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

VOCABULARY = 50_304
QWEN3_MOE = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128,
    "ffn_hidden_size": 6144, "qk_layernorm": True, "layernorm_epsilon": 1e-6, "rotary_base": 1_000_000,
    "moe_ffn_hidden_size": 768, "moe_router_topk": 8, "moe_aux_loss_coeff": 1e-3, "seq": 4096, "batch": 4,
    "microbatches": 8,
}  # fmt: skip
SHAPES = {
    "A": {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "ffn_hidden_size": 5632, "seq": 2048,
          "batch": 8},
    "B": {"num_layers": 8, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8,
          "ffn_hidden_size": 14_336, "seq": 4096, "batch": 2},
    "M1": {**QWEN3_MOE, "num_layers": 6, "num_moe_experts": 128},
    "M2": {**QWEN3_MOE, "num_layers": 24, "num_moe_experts": 16},
    "M3": {"num_layers": 2, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8,
           "ffn_hidden_size": 14_336, "rotary_base": 1_000_000, "num_moe_experts": 8, "moe_ffn_hidden_size": 14_336,
           "moe_router_topk": 2, "moe_aux_loss_coeff": 1e-2, "seq": 4096, "batch": 2, "microbatches": 8},
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "delayed": {
        "fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max",
    },
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}  # fmt: skip
NUM_BATCHES = 4


def experts_of(sizes: dict[str, Any], recipe: str) -> dict[str, Any]:
    """megatron-core's fastest settings for the experts of a shape; empty without experts."""
    if "num_moe_experts" not in sizes:
        return {}
    return {
        "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True, "moe_permute_fusion": True,
        "moe_router_fusion": True, "moe_router_dtype": "fp32", "moe_router_load_balancing_type": "aux_loss",
        "moe_router_padding_for_quantization": "fp8" in RECIPES[recipe],
    }  # fmt: skip


class PeerLoop:
    """Model, optimizer and data of the peer; torch.distributed runs already, on one rank.

    Args:
        turned_off: settings of `TransformerConfig` to do without.
    """

    def __init__(self, shape: str, recipe: str, fused_operations: bool = True, turned_off: Sequence[str] = ()):
        sizes = dict(SHAPES[shape])
        self.length, self.batch = sizes.pop("seq"), sizes.pop("batch")
        self.num_microbatches, rotary_base = sizes.pop("microbatches", 1), sizes.pop("rotary_base", 10_000)
        experts = experts_of(sizes, recipe) | dict.fromkeys(turned_off, False)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        self.config = TransformerConfig(
            **sizes, **experts, **RECIPES[recipe], bf16=True, params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
            attention_dropout=0.0, hidden_dropout=0.0, bias_activation_fusion=True, bias_dropout_fusion=True,
            apply_rope_fusion=True, masked_softmax_fusion=True, cross_entropy_loss_fusion=True,
            cross_entropy_fusion_impl="te", gradient_accumulation_fusion=False,
        )  # fmt: skip
        model = GPTModel(
            config=self.config,
            transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(
                num_experts=sizes.get("num_moe_experts"),
                moe_grouped_gemm=bool(experts),
                qk_layernorm=self.config.qk_layernorm,
                use_te_op_fuser=fused_operations and not experts,
            ),  # fmt: skip
            rotary_base=rotary_base,
            vocab_size=VOCABULARY,
            max_sequence_length=self.length,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        ).cuda()
        for module in model.modules():
            if isinstance(module, TransformerEngineBaseModule) and hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, overlap_param_gather=True,
            use_distributed_optimizer=True,
        )  # fmt: skip
        self.model = DistributedDataParallel(self.config, ddp, Float16Module(self.config, model))
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=3e-5,
                weight_decay=0.1,
                adam_beta1=0.9,
                adam_beta2=0.95,
                clip_grad=1.0,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
                overlap_param_gather=True,
            ),  # fmt: skip
            [self.model],
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.no_sync_func = self.model.no_sync
        generator = torch.Generator().manual_seed(0)
        shape_of_batch = (NUM_BATCHES, self.batch, self.length + 1)
        self.tokens = torch.randint(VOCABULARY, shape_of_batch, generator=generator).cuda()
        self.positions = torch.arange(self.length, device="cuda").expand(self.batch, -1)

    def step(self, number: int) -> float:
        """Train on one batch, or on one for each microbatch; the mean loss."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=self.forward,
            data_iterator=iter([self.tokens[(number + index) % NUM_BATCHES] for index in range(self.num_microbatches)]),
            model=[self.model],
            num_microbatches=self.num_microbatches,
            seq_length=self.length,
            micro_batch_size=self.batch,
            forward_only=False,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = 3e-5
        self.optimizer.step()
        return float(sum(report["loss"] for report in reports) / self.num_microbatches)

    def forward(self, batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
        """megatron-core's forward step: the mean of the tokens' losses."""
        tokens = next(batches)
        losses = model(tokens[:, :-1].contiguous(), self.positions, None, labels=tokens[:, 1:].contiguous())
        return losses, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})
