"""A bare megatron-core training loop with its fastest settings: the baseline of the benchmarks.

The same shapes, dtypes and random tokens as `gpu_steps.py`; Transformer Engine's fused operations, fused loss, fused
rotary embedding, overlapped reductions, FP32 gradients accumulated in the GEMM. Shapes with the name of a model are the
whole model. Mixtures (M1 to M3) have its grouped GEMM, its permute and router kernels, tokens padded in the router for
FP8, and no fused operations, which are for dense layers. With cuBLASLt 13.4 or later (13.5 for tensorwise, 13.6 for
blockwise) experts can run in one launch per GEMM: NVTE_CUTEDSL_FUSED_GROUPED_MLP=1 takes megatron-core 0.19's fused
operations for experts, NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM=1 its usual ones.

Several ranks divide the work by a `Division`: with tensor parallelism the sequence too, experts over ranks that are
also data-parallel, optimizer state over all data-parallel ranks.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

VOCABULARY = 50_304
QWEN3_MOE = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128,
    "ffn_hidden_size": 6144, "qk_layernorm": True, "layernorm_epsilon": 1e-6, "rotary_base": 1_000_000,
    "moe_ffn_hidden_size": 768, "moe_router_topk": 8, "moe_aux_loss_coeff": 1e-3, "seq": 4096, "batch": 4,
    "microbatches": 8,
}  # fmt: skip
LLAMA3 = {
    "num_query_groups": 8, "rotary_base": 500_000, "model": {"vocab_size": 128_256},
}  # fmt: skip
LLAMA32 = LLAMA3 | {
    "seq": 4096, "batch": 2, "microbatches": 8,
    "model": {"vocab_size": 128_256, "share_embeddings_and_output_weights": True, "rope_scaling": True,
              "rope_scaling_factor": 32.0},
}  # fmt: skip
GPT2: dict[str, Any] = {
    "normalization": "LayerNorm", "gated_linear_unit": False, "activation_func": F.gelu, "add_bias_linear": True,
    "apply_rope_fusion": False, "seq": 1024, "microbatches": 8,
    "model": {"share_embeddings_and_output_weights": True, "position_embedding_type": "learned_absolute"},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "A": {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "ffn_hidden_size": 5632, "seq": 2048,
          "batch": 8},
    "B": {"num_layers": 8, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8,
          "ffn_hidden_size": 14_336, "seq": 4096, "batch": 2},
    "M1": {**QWEN3_MOE, "num_layers": 6, "num_moe_experts": 128},
    "M2": {**QWEN3_MOE, "num_layers": 24, "num_moe_experts": 16},
    "M3": {"num_layers": 2, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8,
           "ffn_hidden_size": 14_336, "rotary_base": 1_000_000, "num_moe_experts": 8, "moe_ffn_hidden_size": 14_336,
           "moe_router_topk": 2, "moe_aux_loss_coeff": 1e-2, "seq": 4096, "batch": 2, "microbatches": 8},
    "gpt2-124m": {**GPT2, "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "batch": 32},
    "gpt2-350m": {**GPT2, "num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "batch": 16},
    "llama3.2-1b": {**LLAMA32, "num_layers": 16, "hidden_size": 2048, "num_attention_heads": 32,
                    "ffn_hidden_size": 8192},
    "llama3.2-3b": {**LLAMA32, "num_layers": 28, "hidden_size": 3072, "num_attention_heads": 24,
                    "ffn_hidden_size": 8192},
    "llama3-8b": {**LLAMA3, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
                  "ffn_hidden_size": 14_336, "seq": 8192, "batch": 1, "microbatches": 8},
    "tiny": {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2,
             "ffn_hidden_size": 384, "seq": 64, "batch": 2},
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "delayed": {
        "fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max",
    },
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}  # fmt: skip
RECIPES |= {f"{recipe}-e4m3": RECIPES[recipe] | {"fp8": "e4m3"} for recipe in ("tensorwise", "delayed")}
NUM_BATCHES = 4


@dataclass(frozen=True)
class Division:
    """How ranks divide the work.

    Attributes:
        tensor: ranks that share each layer, and the sequence between layers.
        pipeline: stages.
        expert: data-parallel ranks that share the experts.
        micro_batch: sequences; None for the shape's own.
        num_microbatches: of a step, on each data-parallel rank; None for the shape's own.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    micro_batch: Optional[int] = None
    num_microbatches: Optional[int] = None

    def fields(self) -> dict[str, Any]:
        """Fields of `TransformerConfig`."""
        return {
            "tensor_model_parallel_size": self.tensor, "sequence_parallel": self.tensor > 1,
            "pipeline_model_parallel_size": self.pipeline, "expert_model_parallel_size": self.expert,
            "pipeline_dtype": torch.bfloat16, "deallocate_pipeline_outputs": True,
        }  # fmt: skip


def experts_of(sizes: dict[str, Any], recipe: str) -> dict[str, Any]:
    """megatron-core's fastest settings for the experts of a shape; empty without experts."""
    if "num_moe_experts" not in sizes:
        return {}
    fused = {"use_transformer_engine_op_fuser": True} if is_set("NVTE_CUTEDSL_FUSED_GROUPED_MLP") else {}
    return fused | {
        "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True, "moe_permute_fusion": True,
        "moe_router_fusion": True, "moe_router_dtype": "fp32", "moe_router_load_balancing_type": "aux_loss",
        "moe_router_padding_for_quantization": "fp8" in RECIPES[recipe],
    }  # fmt: skip


def is_set(variable: str) -> bool:
    """Whether the environment turns it on."""
    return os.environ.get(variable, "0") == "1"


def keep_sizes_of_groups_on_the_device() -> None:
    """What Transformer Engine's one launch per GEMM reads; megatron-core gives it numbers of the host."""
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    plain = TEGroupedLinear.forward

    @functools.wraps(plain)
    def forward(self: Any, inputs: torch.Tensor, sizes: list[int]) -> Any:
        return plain(self, inputs, torch.tensor(sizes, dtype=torch.int64).pin_memory().to("cuda", non_blocking=True))

    TEGroupedLinear.forward = forward


def build_config(
    sizes: dict[str, Any], recipe: str, division: Division, turned_off: Sequence[str]
) -> TransformerConfig:
    """The settings of the layers.

    Args:
        sizes: of a shape, without its batch.

    Raises:
        ValueError, AssertionError: megatron-core refuses a size or recipe.
        TypeError: a setting to turn off has an unknown name.
    """
    fields = {
        "bf16": True, "params_dtype": torch.bfloat16, "normalization": "RMSNorm", "gated_linear_unit": True,
        "activation_func": F.silu, "add_bias_linear": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "bias_activation_fusion": True, "bias_dropout_fusion": True, "apply_rope_fusion": True,
        "masked_softmax_fusion": True, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te",
        "gradient_accumulation_fusion": False,
    }  # fmt: skip
    fields |= sizes | experts_of(sizes, recipe) | RECIPES[recipe] | division.fields()
    kind = MLATransformerConfig if sizes.get("multi_latent_attention") else TransformerConfig
    return kind(**(fields | dict.fromkeys(turned_off, False)))


def build_model(config: TransformerConfig, options: dict[str, Any], device: str, fused: bool) -> GPTModel:
    """This rank's part of the model: Transformer Engine's layers, or megatron-core's own on a CPU.

    Args:
        options: of `GPTModel`.
        fused: Transformer Engine's fused operations, in dense layers.
    """
    kinds = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if device == "cuda":
        use_op_fuser = fused and config.num_moe_experts is None
        layers = get_gpt_layer_with_transformer_engine_spec(**kinds, use_te_op_fuser=use_op_fuser)
    else:
        layers = get_gpt_layer_local_spec(**kinds, normalization=config.normalization)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **options,
    ).to(device)
    if device == "cuda":
        add_gradients_in_gemms(model)
    return model


def add_gradients_in_gemms(model: GPTModel) -> None:
    """The layers' GEMMs add weight gradients to the buffers."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    for module in model.modules():
        if isinstance(module, TransformerEngineBaseModule) and hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


class PeerLoop:
    """Model, optimizer and data of the peer; torch.distributed runs already.

    Args:
        turned_off: settings of `TransformerConfig` to do without.
        division: of the work among the ranks; those that it does not mention are data-parallel.
        device: "cuda", or "cpu" to try the loop, which needs the fusions turned off.
        changes: of the shape, as in SHAPES; `optimizer` has fields of `OptimizerConfig`.
    """

    def __init__(
        self,
        shape: str,
        recipe: str,
        fused_operations: bool = True,
        turned_off: Sequence[str] = (),
        division: Division = Division(),
        device: str = "cuda",
        changes: Mapping[str, Any] = MappingProxyType({}),
    ):
        sizes = {**SHAPES[shape], **changes}
        optimizer = sizes.pop("optimizer", {})
        self.length, batch, num_microbatches = sizes.pop("seq"), sizes.pop("batch"), sizes.pop("microbatches", 1)
        options = {
            "rotary_base": sizes.pop("rotary_base", 10_000), "max_sequence_length": self.length,
            "vocab_size": VOCABULARY, "share_embeddings_and_output_weights": False, "position_embedding_type": "rope",
        } | sizes.pop("model", {})  # fmt: skip
        self.batch = division.micro_batch or batch
        self.num_microbatches = division.num_microbatches or num_microbatches
        self.device = device
        parallel_state.initialize_model_parallel(
            division.tensor, division.pipeline, expert_model_parallel_size=division.expert
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        self.config = build_config(sizes, recipe, division, turned_off)
        if is_set("NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"):
            keep_sizes_of_groups_on_the_device()
        model = build_model(self.config, options, device, fused_operations)
        fields = {
            "optimizer": "adam", "lr": 3e-5, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95,
            "clip_grad": 1.0, "bf16": True, "params_dtype": torch.bfloat16, "use_distributed_optimizer": True,
            **optimizer,
        }  # fmt: skip
        is_sharded = fields["use_distributed_optimizer"]
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, overlap_param_gather=is_sharded,
            use_distributed_optimizer=is_sharded,
        )  # fmt: skip
        self.model = DistributedDataParallel(self.config, ddp, Float16Module(self.config, model))
        settings = OptimizerConfig(**fields, overlap_param_gather=is_sharded)
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.no_sync_func = self.model.no_sync
        self.config.grad_sync_func = self.model.start_grad_sync  # later stages: in the pipeline's last bubble
        generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
        shape_of_batch = (NUM_BATCHES, self.batch, self.length + 1)
        self.tokens = torch.randint(options["vocab_size"], shape_of_batch, generator=generator).to(device)
        self.positions = torch.arange(self.length, device=device).expand(self.batch, -1)

    def step(self, number: int) -> float:
        """Train on one batch for each microbatch; the mean loss of this data-parallel rank, on all its stages."""
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
        loss = torch.zeros((), device=self.device)
        for report in reports:  # none but on the last stage
            loss += report["loss"] / self.num_microbatches
        if self.config.pipeline_model_parallel_size > 1:
            dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
        return float(loss)

    def forward(self, batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
        """megatron-core's forward step: the mean of the tokens' losses."""
        tokens = next(batches)
        losses = model(tokens[:, :-1].contiguous(), self.positions, None, labels=tokens[:, 1:].contiguous())
        return losses, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})
