"""Ranges of a profile: the spans of a step, and the forward and backward passes of its modules, by their names.

A range is a `torch.profiler.record_function`, which the trace has, and on CUDA also an NVTX range, for Nsight Systems.

Hooks of modules open and close the ranges of the forward pass. Those of the backward pass belong to the nodes of the
autograd graph: torch's full backward hooks would add nodes of their own, and views, which megatron-core's schedules
refuse. One node of a linear computes dgrad and wgrad: in Transformer Engine's, each GEMM has a range of its own inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from megafp8.mcore.modules import fused_mlps, named_attentions, named_linears
from megafp8.metrics.timers import StepTimer
from megafp8.te.gemm_ranges import gemm_ranges

Range = Callable[[str], AbstractContextManager[Any]]
NORMS = ("input_layernorm", "pre_mlp_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
RANGE = "range"
"""The key of a node's metadata that marks a node with a range."""


@contextmanager
def profile_range(name: str) -> Iterator[None]:
    """A named range of the trace, and of NVTX on CUDA."""
    with ExitStack() as stack:
        stack.enter_context(torch.profiler.record_function(name))
        if torch.cuda.is_available():
            stack.enter_context(torch.cuda.nvtx.range(name))
        yield


@contextmanager
def named_ranges(chunks: Sequence[nn.Module], timer: StepTimer, new_range: Range = profile_range) -> Iterator[None]:
    """Open ranges for the spans of the timer and for the modules of a model, as long as the context lasts.

    Backward passes of what ran forward in the context have ranges, too.
    """
    opened = threading.local()  # `name` of the innermost; autograd's threads have their own

    @contextmanager
    def module_range(name: str) -> Iterator[None]:
        with new_range(name):
            outer, opened.name = getattr(opened, "name", ""), name
            try:
                yield
            finally:
                opened.name = outer

    def gemm_range(gemm: str) -> AbstractContextManager[Any]:
        outer = getattr(opened, "name", "")
        name = f"{outer.rpartition(' ')[0]} {gemm}".lstrip()
        return nullcontext() if name == outer else new_range(name)  # the range of a linear's fprop is open

    with ExitStack() as stack:
        for chunk in chunks:
            for name, module in ranged_modules(chunk):
                for handle in _add_ranges(module, name, module_range):
                    stack.callback(handle.remove)
        stack.enter_context(gemm_ranges(gemm_range))
        stack.callback(setattr, timer, "new_range", timer.new_range)
        timer.new_range = new_range
        yield


def ranged_modules(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with a range and their names, `layers.3.linear_fc1 fprop` for a linear, else without a pass.

    A fused MLP of Transformer Engine calls no linears: it has the range of its layer's MLP.
    """
    is_fused = {linear for linear, mlp in fused_mlps(chunk).items() if not mlp.is_split}
    linears = {module: name for name, module in named_linears(chunk) if module not in is_fused}
    others = {module: name for name, module in named_attentions(chunk)}
    for module in chunk.modules():
        if isinstance(module, TransformerLayer):
            prefix = f"layers.{module.layer_number - 1}."
            others |= {getattr(module, name): prefix + name for name in (*NORMS, "mlp") if hasattr(module, name)}
            for name in ("q_layernorm", "k_layernorm"):
                others[getattr(module.self_attention, name, None)] = prefix + name
        elif isinstance(module, GPTModel):
            names = {"embedding": "embedding", "output_layer": "output_layer"}
            others |= {getattr(module, each): name for each, name in names.items() if hasattr(module, each)}
            others[getattr(module.decoder, "final_layernorm", None)] = "final_layernorm"
    for module, name in {**others, **linears}.items():
        if module is not None and not isinstance(module, IdentityOp):
            yield f"{name} fprop" if module in linears else f"{name} forward", module


def _add_ranges(module: nn.Module, name: str, new_range: Range) -> tuple[Any, Any]:
    """Hooks that open a range around each forward pass of a module, and around each node of its backward pass."""
    opened = ExitStack()

    def before(module: nn.Module, args: Any) -> None:
        opened.enter_context(new_range(name))

    def after(module: nn.Module, args: Any, options: Any, output: Any) -> None:
        opened.close()
        label = f"{name.rpartition(' ')[0]} backward"
        for node in _nodes_between(output, (args, options)):
            if RANGE not in node.metadata:  # that of an inner module, which has returned before
                node.metadata[RANGE] = label
                _add_node_range(node, label, new_range)

    # Also after an error, so that a step that recovers from it has its ranges closed.
    return module.register_forward_pre_hook(before), module.register_forward_hook(
        after, with_kwargs=True, always_call=True
    )


def _nodes_between(outputs: Any, inputs: Any) -> Iterator[Node]:
    """The nodes of the autograd graph that compute tensors of `outputs` from those of `inputs`."""
    seen = {_node_of(each) for each in tree_leaves(inputs)}
    waiting = [_node_of(each) for each in tree_leaves(outputs)]
    while waiting:
        node = waiting.pop()
        # A leaf's node adds to its gradient, and DDP's hooks there launch reductions.
        if node is None or node in seen or hasattr(node, "variable"):
            continue
        seen.add(node)
        yield node
        waiting += [inner for inner, _ in node.next_functions]


def _node_of(value: Any) -> Node | None:
    return value.grad_fn if isinstance(value, Tensor) else None


def _add_node_range(node: Node, label: str, new_range: Range) -> None:
    """Open a range around a node's part of the backward pass."""
    opened = ExitStack()

    def before(grad_outputs: Any) -> None:
        opened.enter_context(new_range(label))

    def after(grad_inputs: Any, grad_outputs: Any) -> None:
        opened.close()

    node.register_prehook(before)
    node.register_hook(after)
