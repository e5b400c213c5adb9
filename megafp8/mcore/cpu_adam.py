"""Adam for the CPU, with the state layout that megatron-core's distributed optimizer expects."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Adam(torch.optim.Optimizer):
    """AdamW with one `step` per parameter group, as in the FusedAdam of Transformer Engine and Apex.

    megatron-core's distributed optimizer loads and saves checkpoints only in that layout. Moments have the dtype of the
    parameters, which are FP32 master weights.

    Source: Kingma and Ba 2015, algorithm 1; decoupled decay: Loshchilov and Hutter 2019, algorithm 2.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        capturable: bool = False,
    ):
        assert not capturable, "a CPU has no CUDA graphs"
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
                self.step_group(group, [p for p in group["params"] if p.grad is not None])

    def step_group(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Update one parameter group with multi-tensor operations."""
        if not parameters:
            return
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
        gradients = [local(p.grad) for p in parameters]
        exp_avgs = [local(self.state[p]["exp_avg"]) for p in parameters]
        exp_avg_sqs = [local(self.state[p]["exp_avg_sq"]) for p in parameters]
        parameters = [local(p) for p in parameters]
        beta1, beta2 = group["betas"]
        correction1, correction2 = 1.0, 1.0
        if group["bias_correction"]:
            correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        if group["weight_decay"] and not self.adam_w_mode:
            gradients = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
        torch._foreach_lerp_(exp_avgs, gradients, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1 - beta2)
        denominator = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_div_(denominator, correction2**0.5)
        torch._foreach_add_(denominator, group["eps"])
        if group["weight_decay"] and self.adam_w_mode:
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, exp_avgs, denominator, -group["lr"] / correction1)
