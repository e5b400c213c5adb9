"""megatron-core's sharded optimizers with a fused Adam step that does not synchronize with the device.

A step of megatron-core divides the gradients by the number of tokens, computes their norm and copies it to the host,
clips the gradients, runs Adam, and copies the master weights into the model. Each of these is a pass over the gradients
or weights. Here the division and the clipping are factors inside the Adam kernel, which also writes the model weights.
The gradient norm stays on the device, and the caller reads it together with the loss.

They are its distributed optimizer, and its optimizer of a rank's rows of sharded weights. State, checkpoints and
parameter groups are those of the wrapped optimizers. Numerics: those of Transformer Engine's Adam up to rounding, see
`adam_kernel`. The sum of the gradient norm has another order.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.fp8_utils import is_float8tensor, quantize_param_shard
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from megafp8.config.schema import OptimizerConfig
from megafp8.optimizer.tensor_table import ParameterRow, build_rows

FP8_CAST_CAPABILITY = (8, 9)  # compute capability
CLIP_EPSILON = 1e-6  # megatron-core's


def device_problem(settings: OptimizerConfig, on_cuda: bool) -> Optional[str]:
    """Why this machine cannot run the fused Adam; None if it can. `config.fused_adam` has what settings prevent."""
    if not on_cuda:
        return "no CUDA device"
    has_fp8 = "fp8" in (settings.exp_avg_dtype, settings.exp_avg_sq_dtype)
    if has_fp8 and torch.cuda.get_device_capability() < FP8_CAST_CAPABILITY:
        return "FP8 moments on a GPU that has no casts to FP8"
    return None if distrib_optimizer.USING_TE_OPTIMIZER else "no Transformer Engine, whose Adam keeps the state"


def clip_factor(max_norm: float, grad_norm: float) -> float:
    """What clipping multiplies gradients with; 1 without clipping, which `max_norm` 0 stands for."""
    return min(1.0, max_norm / (grad_norm + CLIP_EPSILON)) if max_norm > 0 else 1.0


class FusedAdamOptimizer(ChainedOptimizer):
    """megatron-core's sharded Adam optimizers of a run, with a fused step.

    `finalize` replaces `finalize_model_grads`. After it, call `squared_norm` and `step(grad_norm)`, or only `step()`.

    Args:
        num_copies: ranks that have the same shards.
    """

    def __init__(self, optimizer: ChainedOptimizer, device: torch.device, num_copies: int = 1):
        super().__init__(optimizer.chained_optimizers)
        # A divisor of the squared norm: the all-reduce of the step counts each shard as often as it exists.
        self._num_copies = num_copies
        self.grad_factor = torch.ones(1, device=device)
        self._tables: Optional[TensorTables] = None
        for part in self.parts():
            # Loading replaces tensors of the state. The tables hold addresses, so that they are built again.
            part.optimizer.register_load_state_dict_post_hook(self._discard_tables)

    def parts(self) -> list[Any]:
        """The optimizers with parameters on this rank."""
        return [part for part in self.chained_optimizers if not part.is_stub_optimizer]

    def finalize(self, model: list[Any], num_tokens: Optional[Tensor] = None, **options: Any) -> None:
        """Reduce the gradients as megatron-core does, and store the factor 1 / num_tokens for the step."""
        # None in place of the tokens: megatron-core then leaves out its pass that divides the gradients.
        finalize_model_grads(model, None, **options)
        if num_tokens is None:
            self.grad_factor.fill_(1.0)
            return
        stages = parallel_state.get_pipeline_model_parallel_group()
        # Only the last pipeline stage has counted tokens. Broadcast first, then add over the data-parallel ranks, as
        # megatron-core does.
        dist.broadcast(num_tokens, parallel_state.get_pipeline_model_parallel_last_rank(), stages)
        dist.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        # `where`, because megatron-core's `if num_tokens > 0` lets the host wait. Without tokens the sums stay.
        self.grad_factor.copy_(torch.where(num_tokens > 0, 1.0 / num_tokens, 1.0))

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """Squared norm of this rank's gradient shards, FP64 on the device.

        Divided by the number of ranks that have the same shards, so that its sum over all ranks is the squared gradient
        norm.
        """
        from megafp8.kernels.adam import squared_sum  # needs Triton

        sums = [squared_sum(table, self.grad_factor) for table in self.tables().norm]
        if not sums:
            return torch.zeros((), dtype=torch.float64, device=self.grad_factor.device)
        return torch.stack(sums).sum() / self._num_copies

    @torch.no_grad()
    def step(self, grad_norm: Optional[float] = None) -> tuple[bool, float, Optional[float]]:
        """Update master weights, moments and model weights, and gather the weights unless gathers are overlapped.

        Args:
            grad_norm: of all gradients; if None, it is computed here, which synchronizes with the device.

        Returns:
            True, the norm before clipping, and the number of zeros in the gradients if `log_num_zeros_in_grad` is set.
        """
        if grad_norm is None:
            # One synchronization, also for the host: every rank gets the same sum, and so the same clipping factor.
            total = self.squared_norm()
            dist.all_reduce(total)
            grad_norm = math.sqrt(total.item())
        num_zeros = None
        if self.config.log_num_zeros_in_grad:
            self.prepare_grads()
            num_zeros = self.count_zeros()
        # The norm is that of the gradients divided by the tokens, since the kernel that took it has the same factor.
        self._update(clip_factor(self.config.clip_grad, grad_norm))
        return True, grad_norm, num_zeros

    def _update(self, clip: float) -> None:
        """Update and gather the weights, with gradients multiplied by `clip`."""
        from megafp8.kernels.adam import AdamStep, update_rows  # needs Triton

        tables = self.tables()
        for index, part in enumerate(self.parts()):
            for group_index, group in enumerate(part.optimizer.param_groups):
                # Transformer Engine's Adam counts steps in the group too, where checkpoints have them.
                group["step"] = group.get("step", 0) + 1
                adam_step = AdamStep(
                    learning_rate=float(group["lr"]),
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    eps=group["eps"],
                    weight_decay=float(group["weight_decay"]),
                    step=group["step"],
                    clip=clip,
                )
                for table, scales in tables.update.get((index, group_index), ()):
                    # First the scales of the new moments, which takes a pass; then the update, which stores with them.
                    new_scales = None if scales is None else scales.update(self.grad_factor, adam_step)
                    update_rows(table, self.grad_factor, adam_step, new_scales)
            # FP8 weights get their codes from the FP32 masters. The scales need the amax over all ranks with parts of
            # the weight: a collective.
            if tables.has_fp8_weights:
                quantize_param_shard(*part._get_fp8_params_and_shard_fp32_from_fp8(), part.data_parallel_group)
        # With overlapped gathers the forward pass of the next step starts them. A chunk gathers the weights of all
        # parts, those of experts included.
        gathering = [part for part in self.parts() if isinstance(part, DistributedOptimizer)]
        if gathering and not gathering[0].ddp_config.overlap_param_gather:
            for chunk in gathering[0].model_chunks:
                chunk.start_param_sync()

    def tables(self) -> TensorTables:
        """The tensor tables of the kernels, rebuilt after a state was loaded."""
        if self._tables is None:
            self._tables = TensorTables(self.parts())
        return self._tables

    def _discard_tables(self, _: torch.optim.Optimizer) -> None:
        self._tables = None


class TensorTables:
    """Tensor tables of all parameters, one per kernel launch.

    Attributes:
        update: tables of the update with the scales of FP16 and FP8 moments, by (optimizer, parameter group) index.
        norm: gradients that count in the norm; each counts on one rank only.
    """

    def __init__(self, parts: list[Any]):
        from megafp8.kernels.adam import BLOCK, SUM_CHUNK, TensorTable  # needs Triton
        from megafp8.optimizer.moment_scales import MomentScales

        self.update: dict[tuple[int, int], list[tuple[TensorTable, Optional[MomentScales]]]] = {}
        self.has_fp8_weights = False
        norm_grads: dict[torch.dtype, list[tuple[Tensor]]] = {}
        for index, part in enumerate(parts):
            for group_index in range(len(part.optimizer.param_groups)):
                rows: dict[Any, list[ParameterRow]] = {}
                # Rows with the same dtypes share a launch, whose types are constants.
                for model_param, shard, row in build_rows(part, group_index):
                    rows.setdefault(row.dtypes, []).append(row)
                    self.has_fp8_weights |= is_float8tensor(model_param)
                    # Each gradient counts once: copies on tensor-parallel ranks and tied weights are left out.
                    if param_is_not_shared(shard) and tensor_parallel.param_is_not_tensor_parallel_duplicate(shard):
                        norm_grads.setdefault(row.grad.dtype, []).append((row.grad,))
                if rows:
                    self.update[index, group_index] = [
                        (
                            TensorTable([row.tensors for row in group_rows], BLOCK),
                            MomentScales(group_rows) if any(group_rows[0].scales) else None,
                        )
                        for group_rows in rows.values()
                    ]
        self.norm = [TensorTable(grads, SUM_CHUNK) for grads in norm_grads.values()]
