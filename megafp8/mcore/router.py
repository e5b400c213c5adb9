"""The strength of a router's losses: the number of tokens that megatron-core multiplies an auxiliary loss with.

megatron-core 0.16 takes the tokens of this rank alone: on n tensor- and context-parallel ranks the loss is n times too
weak, and that of each sequence also as many times as a microbatch has sequences. 0.19 multiplies by the ranks itself.
"""

from __future__ import annotations

import torch.distributed as dist

from megafp8.mcore.patches import is_installed

ROUTER_EVIDENCE = (
    (
        ("transformer/moe/router.py", "MoEAuxLossAutoScaler.apply(activation, aux_loss * num_tokens)"),
        ("transformer/moe/router.py", "MoEAuxLossAutoScaler.apply(logits, z_loss * num_tokens)"),
    )
    if is_installed("<0.19")
    else (
        ("transformer/moe/router.py", "activation, aux_loss * num_local_tokens * self.tp_cp_group.size()"),
        ("transformer/moe/router.py", "logits, z_loss * num_local_tokens * self.tp_cp_group.size()"),
    )
)
"""The code of megatron-core that `counted_tokens` and `models.router.Router` are for. A test fails when it is gone."""


def counted_tokens(num_tokens: int, group: dist.ProcessGroup) -> int:
    """The `valid_token_count` of an auxiliary loss with which it is multiplied by the tokens of all ranks of a group.

    Args:
        num_tokens: of the microbatch on this rank.
        group: the ranks that share the microbatch.
    """
    return num_tokens * group.size() if is_installed("<0.19") else num_tokens
