"""megatron-core's distributed optimizer with its update in one pass over the parameters, and without a wait of its own.

Upstream a step reads and writes the gradients to divide them by the number of tokens, reads them for their norm and
brings the norm to the host, reads and writes them to clip them, then Adam, then a copy of the master weights into the
model. Here the division and the clipping are factors inside Adam's kernel, which writes the model's weights as well.
The norm is left on the device for the caller, who has to wait for the loss anyway.

State, checkpoints and parameter groups are those of the optimizer inside. Numerics: those of Transformer Engine's Adam
up to roundings, see `adam_kernel`; the norm's sum is taken in another order.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.fp8_utils import is_float8tensor, quantize_param_shard
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.optimizer.tensor_table import ParameterRow, row_of

CASTS_TO_FP8_SINCE = (8, 9)  # compute capability
CLIP_EPSILON = 1e-6  # megatron-core's


def obstacle(config: RunConfig, on_cuda: bool) -> Optional[str]:
    """Why a run's optimizer is not of this kind; None if it is."""
    moments = (config.optimizer.exp_avg_dtype, config.optimizer.exp_avg_sq_dtype)
    of_machine = (
        (not on_cuda, "no CUDA device"),
        ("fp8" in moments and on_cuda and not has_fp8_casts(), "FP8 moments on a GPU that has no casts to FP8"),
        (on_cuda and not has_fused_adam(), "no Transformer Engine, whose Adam keeps the state"),
    )
    found = derived.fused_adam_obstacle(config)
    return found if found is not None else next((reason for is_so, reason in of_machine if is_so), None)


def has_fused_adam() -> bool:
    """Whether megatron-core uses Transformer Engine's Adam."""
    from megatron.core.optimizer import distrib_optimizer

    return distrib_optimizer.USING_TE_OPTIMIZER


def has_fp8_casts() -> bool:
    """Whether this process's GPU has instructions that cast to FP8."""
    return torch.cuda.get_device_capability() >= CASTS_TO_FP8_SINCE


class FusedAdamOptimizer(ChainedOptimizer):
    """megatron-core's optimizers of one run, all of them distributed ones around an Adam.

    `finalize` takes the place of `finalize_model_grads`. Then `squared_norm` and `step`; or `step` alone.
    """

    def __init__(self, optimizer: ChainedOptimizer, device: torch.device):
        super().__init__(optimizer.chained_optimizers)
        self.grad_factor = torch.ones(1, device=device)
        self._tables: Optional[Tables] = None
        for part in self.parts():
            part.optimizer.register_load_state_dict_post_hook(self._forget_tables)

    def parts(self) -> list[DistributedOptimizer]:
        """The optimizers that have parameters on this rank."""
        return [part for part in self.chained_optimizers if not part.is_stub_optimizer]

    def finalize(self, model: list[Any], num_tokens: Optional[Tensor] = None, **options: Any) -> None:
        """Reduce the gradients as megatron-core does, and note the number of tokens that they are to be divided by."""
        finalize_model_grads(model, None, **options)
        if num_tokens is None:
            self.grad_factor.fill_(1.0)
            return
        stages = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(num_tokens, parallel_state.get_pipeline_model_parallel_last_rank(), stages)
        dist.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        self.grad_factor.copy_(torch.where(num_tokens > 0, 1.0 / num_tokens, 1.0))

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """Square of the norm of the gradients that this rank updates with, FP64 on the device; to be summed over
        the ranks of `get_grad_stats_parallel_group`."""
        from megafp8.kernels.adam import squared_sum  # needs Triton

        sums = [squared_sum(table, self.grad_factor) for table in self.tables().norm]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=self.grad_factor.device)

    @torch.no_grad()
    def step(self, grad_norm: Optional[float] = None) -> tuple[bool, float, Optional[float]]:
        """Update master weights, moments and the model's weights, and gather them where that is not overlapped.

        Args:
            grad_norm: of all gradients; taken here, with a wait for the device, if None.

        Returns:
            True, the norm before clipping, and the number of zeros in the gradients if that is asked for.
        """
        if grad_norm is None:
            total = self.squared_norm()
            dist.all_reduce(total, group=self.get_grad_stats_parallel_group())
            grad_norm = math.sqrt(total.item())
        num_zeros = None
        if self.config.log_num_zeros_in_grad:
            for part in self.parts():
                part._copy_model_grads_to_main_grads()
            num_zeros = self.count_zeros()
        largest = self.config.clip_grad
        clip = min(1.0, largest / (grad_norm + CLIP_EPSILON)) if largest > 0 else 1.0
        self._update(clip)
        return True, grad_norm, num_zeros

    def _update(self, clip: float) -> None:
        """Everything after the norm."""
        from megafp8.kernels.adam import AdamStep, update_rows  # needs Triton

        tables = self.tables()
        for index, part in enumerate(self.parts()):
            for group_index, group in enumerate(part.optimizer.param_groups):
                group["step"] = group.get("step", 0) + 1
                numbers = AdamStep(
                    learning_rate=float(group["lr"]),
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    eps=group["eps"],
                    weight_decay=float(group["weight_decay"]),
                    step=group["step"],
                    clip=clip,
                )
                for table, scales in tables.update.get((index, group_index), ()):
                    renewed = None if scales is None else scales.renew(self.grad_factor, numbers)
                    update_rows(table, self.grad_factor, numbers, renewed)
            if tables.has_fp8_weights:
                quantize_param_shard(*part._get_fp8_params_and_shard_fp32_from_fp8(), part.data_parallel_group)
            if not part.ddp_config.overlap_param_gather:
                for chunk in part.model_chunks:
                    chunk.start_param_sync()

    def tables(self) -> Tables:
        """Where the kernels find everything; made anew after state was loaded."""
        if self._tables is None:
            self._tables = Tables(self.parts())
        return self._tables

    def _forget_tables(self, _: torch.optim.Optimizer) -> None:
        self._tables = None


class Tables:
    """The tensors of all parameters, grouped by what one launch of a kernel takes.

    Attributes:
        update: by number of the optimizer and of its parameter group; with the scales of moments that have them.
        norm: gradients that count in the norm, each once over all ranks.
    """

    def __init__(self, parts: list[DistributedOptimizer]):
        from megafp8.kernels.adam import BLOCK, SUM_CHUNK, TensorTable  # needs Triton
        from megafp8.optimizer.moment_scales import MomentScales

        self.update: dict[tuple[int, int], list[tuple[TensorTable, Optional[MomentScales]]]] = {}
        self.has_fp8_weights = False
        counted: dict[torch.dtype, list[tuple[Tensor]]] = {}
        for index, part in enumerate(parts):
            for group_index, group in enumerate(part.optimizer.param_groups):
                rows: dict[Any, list[ParameterRow]] = {}
                models = [*part.model_fp32_groups[group_index], *part.model_float16_groups[group_index]]
                for model, shard in zip(models, group["params"], strict=True):
                    row = row_of(part, model, shard)
                    rows.setdefault(row.dtypes, []).append(row)
                    self.has_fp8_weights |= is_float8tensor(model)
                    if param_is_not_shared(shard) and tensor_parallel.param_is_not_tensor_parallel_duplicate(shard):
                        counted.setdefault(row.grad.dtype, []).append((row.grad,))
                if rows:
                    self.update[index, group_index] = [
                        (
                            TensorTable([row.tensors for row in alike], BLOCK),
                            MomentScales(alike) if any(alike[0].scales) else None,
                        )
                        for alike in rows.values()
                    ]
        self.norm = [TensorTable(grads, SUM_CHUNK) for grads in counted.values()]
