"""Patches that let megatron-core run on a CPU build of torch. None is applied where a GPU is available.

megatron-core depends on GPUs in four ways, each with its own fix:

- It calls functions of `torch.cuda` that raise on a CPU build. They are replaced by CPU versions.
- It passes `device="cuda"` to tensor factories. Those modules get a proxy of `torch` that creates CPU tensors.
- It multiplies BF16 matrices, in which many CPUs are slow. `torch.matmul` then multiplies FP32 numbers.
- It selects parameters by the type name `torch.cuda.FloatTensor`. Types are renamed inside two constructors.

No patch but that of `torch.matmul` adds a cost per operation. The `evidence` of a patch quotes the code of
megatron-core that makes it necessary. A test fails when a quoted text is gone, and the patch can then be removed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import multiprocessing
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megafp8.kernels.cpu_matmul import multiplied, multiplies_bf16
from megafp8.mcore import mixture_patches
from megafp8.mcore.cpu_adam import Adam, local
from megafp8.mcore.patches import Patch, apply_installed, import_core, is_installed

# ---- Warnings of megatron-core, Transformer Engine and torch that every run gives and that users cannot act on ------

KNOWN_WARNINGS = (
    (UserWarning, r".*Apex (is|are) not installed.*", r"megatron\.core\..*"),
    (UserWarning, r"Transformer Engine.* not installed.*", r"megatron\.core\..*"),
    # Experts on one tensor-parallel rank each, which keep whole sequences; the other layers do not change.
    (UserWarning, r"`sequence_parallel` is set to `True`, but", r"megatron\.core\.tensor_parallel\.layers"),
    (UserWarning, r"full scope is deprecated", r"megatron\.core\.transformer\.transformer_config"),
    (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer\..*"),
    (UserWarning, r"mxfp8 without using reuse_grad_buf", r"megatron\.core\.optimizer\..*"),
    # Nothing changes a model's output, the losses, in place.
    (
        UserWarning,
        r"FSDP2-wrapped module \(FSDP(GPTModel|Float16Module)\) returned a view",
        r"torch\.distributed\.fsdp",
    ),
    (UserWarning, r"MimoModelConfig is experimental", r"megatron\.core\.models\.mimo\..*"),
    (RuntimeWarning, r"Detected a Jax installation", r"transformer_engine"),
    (FutureWarning, r"`torch\.distributed\..*` is deprecated", r"torch\.distributed\.c10d_logger"),
    (FutureWarning, r"Please use DTensor instead", r"torch\.distributed\.checkpoint\..*"),
    (FutureWarning, r"`load_state_dict` is deprecated", r"megatron\.core\.dist_checkpointing\..*"),
    (FutureWarning, r"`load_state_dict` is deprecated", r"megafp8\.checkpoint\.serialization"),
    (FutureWarning, r"The 'is_cg_capturable' parameter is deprecated", r"transformer_engine\.pytorch\.cross_entropy"),
)
KNOWN_LOG_MESSAGES = (
    # Synthetic data needs no cached index.
    ("megatron.core.datasets.gpt_dataset", "path_to_cache is None", ""),
    # One for each layer whose MLP is a class of ours: it takes the process's tensor-parallel group, which is the one
    # that megatron-core passes to its own classes.
    ("megatron.core.transformer.transformer_layer", "Unknown MLP type", "<0.19"),
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED", ">=0.19"),
    # It then computes the layout itself, as 0.16 does.
    ("megatron.core.distributed.distributed_data_parallel", "full_param_layout not provided", ">=0.19"),
    # The checkpoints have a file common.pt, as those of 0.16.
    ("megatron.core.dist_checkpointing.strategies.common", "load_common is deprecated", ">=0.19"),
    # A CUDA build of torch on a machine with the CUDA toolkit and without a GPU.
    ("torch.utils.cpp_extension", "No CUDA runtime is found", ""),
)
"""Logger and text of warnings that are logged, by the same criteria as `KNOWN_WARNINGS`, and megatron-core's versions
that log them."""


def silence_known_warnings() -> None:
    """Filter out all of them."""
    for category, message, module in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", category=category, message=message, module=module)
    for logger, text, _ in KNOWN_LOG_MESSAGES:
        silence_log_message(logger, text)


def silence_log_message(logger: str, text: str) -> None:
    """Filter out the records of a logger that contain a text."""
    logging.getLogger(logger).addFilter(lambda record: text not in str(record.msg))


# ---------------------------------------------------------------------------------------------------------------------
# Patches that precede the first import of megatron-core: of runs on a CPU (see `cpu_patches.py`), and of all tests

PAGED_STASH = "megatron.core.transformer.moe.ops.paged_stash"


def patch_compile() -> None:
    """Let `torch.compile` return the function it is given, without importing the compiler.

    megatron-core applies it at import. On a CPU the compiled functions would take 10 s and need a C++ compiler. Where
    the environment disables compilation, torch runs plain functions, too, but still imports its compiler, which is a
    third of the time that a command takes to start. TORCH_COMPILE_DISABLE=0 leaves everything as it is.
    """
    if os.environ.setdefault("TORCH_COMPILE_DISABLE", "1") != "1":
        return

    def compile(model: Any = None, **options: Any) -> Any:
        return (lambda function: function) if model is None else model

    torch.compile = compile


def patch_triton_import() -> None:
    """Without Triton, replace the module of kernels that imports it. Only mixture-of-experts layers call them."""
    if importlib.util.find_spec("triton") is None:
        names = ("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel")
        module = types.ModuleType(PAGED_STASH)
        module.__dict__.update(dict.fromkeys(names))
        sys.modules[PAGED_STASH] = module


IMPORT_PATCHES = (
    Patch(
        "torch.compile",
        "every import waits for torch's compiler, which a CPU does not use",
        (("jit.py", "jit_fuser = torch.compile"), ("fusions/fused_bias_swiglu.py", "@jit_fuser")),
        patch_compile,
    ),
    Patch(
        "Triton",
        "Triton is imported without a test for it, and a CPU build of torch comes without it",
        (("transformer/moe/ops/paged_stash.py", "import triton\n"),),
        patch_triton_import,
        versions=">=0.19",
    ),
)


def apply_import_patches() -> None:
    """Apply them, for a program that imports megatron-core without the other patches."""
    apply_installed(IMPORT_PATCHES)


# ----------------------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


class NoOpStream:
    """A CUDA stream or event for a CPU, where all work is already done and waiting does nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def synchronize(self, other: Any = None) -> None:
        """Do nothing."""

    wait_stream = wait_event = record = wait = synchronize

    def record_event(self, event: Any = None) -> "NoOpStream":
        """The stream itself serves as its event."""
        return self

    def query(self) -> bool:
        """True: all work is done."""
        return True


def patch_torch_cuda() -> None:
    """Replace functions of `torch.cuda`, each by an object of its own, because torch's tracer rejects duplicates."""
    cuda, stream = torch.cuda, NoOpStream()
    cuda.current_device = lambda: CPU
    for owner, name in (
        (cuda, "set_device"),
        (cuda, "synchronize"),
        (cuda, "empty_cache"),
        (cuda.nvtx, "range_push"),
        (cuda.nvtx, "range_pop"),
    ):
        setattr(owner, name, lambda *args, **kwargs: None)
    cuda.Stream, cuda.Event = NoOpStream, type("InOrderEvent", (NoOpStream,), {})
    cuda.current_stream, cuda.default_stream = (lambda device=None: stream), (lambda device=None: stream)
    cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def patch_random_state() -> None:
    """Use the CPU generator for the CUDA random state, for the dropout tracker and recomputation."""
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.default_generator.manual_seed
    random = import_core("tensor_parallel.random")
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # megatron-core warns when the CPU state changes inside a fork of the CUDA state; here both are the same.
    silence_log_message(random.__name__, "CPU RNG state changed")


FACTORIES = frozenset(("tensor", "zeros", "ones", "empty", "empty_like", "full", "arange"))
MODULES_NAMING_CUDA = (
    "pipeline_parallel.schedules",
    "optimizer.clip_grads",
    "optimizer.optimizer",
    "optimizer.grad_scaler",
    "utils",
    "transformer.utils",
    "tensor_parallel.data",
    "models.common.embeddings.rope_utils",
    "rerun_state_machine",
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.state_dict_saver",
)


class TorchOnCpu(types.ModuleType):
    """A proxy of `torch` whose factories create CPU tensors where "cuda" is requested."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in FACTORIES:
            value = redirect_to_cpu(value)
        self.__dict__[name] = value
        return value


def redirect_to_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a factory to replace device "cuda" by the CPU and to ignore `pin_memory`."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def patch_device_literals() -> None:
    """Give the modules that pass `device="cuda"` to factories the proxy of torch."""
    proxy = TorchOnCpu("torch")
    for module in MODULES_NAMING_CUDA:
        import_core(module).torch = proxy


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Context in which `tensor.type()` returns `torch.cuda.FloatTensor` for a CPU tensor."""
    original = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = cuda_type
    try:
        yield
    finally:
        torch.Tensor.type = original


def patch_type_names() -> None:
    """Construct the two optimizers that select parameters by type name with CUDA's type names."""
    for module, name in (
        ("optimizer.optimizer", "Float16OptimizerWithFloat16Params"),
        ("optimizer.distrib_optimizer", "DistributedOptimizer"),
    ):
        optimizer = getattr(import_core(module), name)
        optimizer.__init__ = cuda_type_names()(optimizer.__init__)


def clip_by_total_norm(
    parameters: list[torch.Tensor], max_norm: float, total_norm: float, use_decoupled_grad: bool = False
) -> None:
    """Scale gradients so that their global norm is at most `max_norm`, as megatron-core does on a GPU."""
    gradients = [local(each.grad) for each in parameters if each.grad is not None]
    factor = max_norm / (total_norm + 1.0e-6)
    if factor < 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)


def total_norm(gradients: list[torch.Tensor], norm_type: float = 2.0, grad_stats_parallel_group: Any = None) -> float:
    """L2 norm of the gradients of all ranks of a group, rounded to FP32.

    Numerics: squares of FP32 numbers are exact in FP64, and the error of their sum is far below FP32's. The result does
    therefore not depend on how the gradients are divided among tensors and ranks.
    """
    assert norm_type == 2.0
    squares = torch.zeros((), dtype=torch.float64)
    sharding_group = None  # ranks with other rows of the same gradients
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            sharding_group = gradient.device_mesh.get_group()
        squares += torch.linalg.vector_norm(local(gradient).double()).square()
    if sharding_group is not None:
        torch.distributed.all_reduce(squares, group=sharding_group)
    torch.distributed.all_reduce(squares, group=grad_stats_parallel_group)
    return squares.sqrt().float().item()


def patch_grad_norm() -> None:
    """Sum the gradient norm in FP64. Clipping carries even its last bit into every weight."""
    import_core("optimizer.optimizer").get_grad_norm_fp32 = total_norm


def patch_clipping() -> None:
    """Replace megatron-core's clipping, which asserts the CUDA type name of every gradient."""
    import_core("optimizer.optimizer").clip_grad_by_total_norm_fp32 = clip_by_total_norm


def patch_adam() -> None:
    """Use `cpu_adam.Adam` in place of FusedAdam."""
    optimizers, distributed = import_core("optimizer"), import_core("optimizer.distrib_optimizer")
    optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = Adam, False
    distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_TE_OPTIMIZER = Adam, True, True


@functools.cache
def results_queue() -> Any:
    """The queue between the checkpoint writers and the trainer, served by a forked manager."""
    return multiprocessing.get_context("fork").Manager().Queue()


def patch_checkpoint_manager() -> None:
    """Fork the manager. A spawned one imports the program again, which takes seconds and hangs without a main guard."""
    name = "_get_write_results_queue" if is_installed("<0.19") else "get_write_results_queue"
    setattr(import_core("dist_checkpointing.strategies.filesystem_async"), name, results_queue)


def patch_recompute_without_fp8() -> None:
    """Pass `fp8=None` for `fp8=False`: recomputation tests `fp8 is not None` before it reads TE's FP8 state."""
    recompute = import_core("tensor_parallel.random").CheckpointWithoutOutput
    original = recompute.__init__
    recompute.__init__ = lambda self, fp8=False: original(self, fp8 or None)


def copy_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Give a released output, and all views of it, the bytes of the recomputed one, without counting it as a change."""
    storage, source = output.untyped_storage(), recomputed.untyped_storage()
    storage.resize_(source.size())
    storage.copy_(source)


def patch_share_storage() -> None:
    """Copy recomputed outputs. megatron-core compiles a C++ extension to share their memory: a minute for every user,
    and a process that is killed meanwhile leaves a lock that all later ones wait for."""
    import_core("tensor_parallel.random")._get_share_storage = lambda: copy_storage


def patch_bucket_groups() -> None:
    """Put each buffer into groups of its own, the embedding's last: gathers start with the last group."""
    distributed = import_core("distributed.distributed_data_parallel")
    original = distributed.partition_buckets

    def partition(buffers: list[Any], **options: Any) -> list[Any]:
        fp8_first = sorted(buffers, key=lambda buffer: buffer.param_dtype != torch.uint8)
        return [group for buffer in fp8_first for group in original([buffer], **options)]

    distributed.partition_buckets = partition


def patch_dummy_wgrad() -> None:
    """Where Transformer Engine is installed, return empty CPU tensors in place of its shared CUDA buffers."""
    layers = import_core("tensor_parallel.layers")
    if not layers.HAVE_TE:
        return

    def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
        return (torch.zeros if zero else torch.empty)(shape, dtype=dtype)

    layers.get_dummy_wgrad = get_dummy_wgrad


def patch_bf16_matmul() -> None:
    """Multiply BF16 matrices as FP32 numbers, and round the result, where the CPU is slow in BF16."""
    if multiplies_bf16():
        return
    for owner in (torch, torch.Tensor):
        owner.matmul = widening(owner.matmul)


def widening(product: Callable[..., Any]) -> Callable[..., Any]:
    """A product whose operands are widened if they are two BF16 tensors, without anything else."""

    @functools.wraps(product)
    def call(*operands: Any, **options: Any) -> Any:
        is_bf16 = [isinstance(each, torch.Tensor) and each.dtype == torch.bfloat16 for each in operands]
        return product(*operands, **options) if options or is_bf16 != [True, True] else multiplied(product, *operands)

    return call


PATCHES = (
    *IMPORT_PATCHES,
    Patch(
        "torch.cuda functions",
        "current_device, streams, events and Tensor.cuda raise on a CPU build",
        (
            ("distributed/param_and_grad_buffer.py", "torch.cuda.current_device()"),
            ("pipeline_parallel/p2p_communication.py", "torch.cuda.current_device()"),
            ("pipeline_parallel/p2p_communication.py", "torch.cuda.synchronize()"),
            ("distributed/param_and_grad_buffer.py", "self.communication_stream.wait_stream(torch.cuda."),
            ("models/common/language_module/language_module.py", ".cuda()"),
        ),
        patch_torch_cuda,
    ),
    Patch(
        "random state",
        "the dropout tracker and recomputation save and restore a CUDA generator",
        (
            ("tensor_parallel/random.py", "torch.cuda.get_rng_state()"),
            ("tensor_parallel/random.py", "torch.cuda.manual_seed(seed)"),
        ),
        patch_random_state,
    ),
    Patch(
        "literal device",
        "factories are called with device=\"cuda\" or device='cuda'",
        (
            ("pipeline_parallel/schedules.py", 'device="cuda"'),
            ("optimizer/optimizer.py", "device='cuda'"),
            ("optimizer/clip_grads.py", "device='cuda'"),
        ),
        patch_device_literals,
    ),
    Patch(
        "type names",
        "optimizers refuse parameters whose type is not named torch.cuda.*",
        (
            ("optimizer/optimizer.py", "'torch.cuda.FloatTensor'"),
            ("optimizer/distrib_optimizer.py", "'torch.cuda.FloatTensor'"),
        ),
        patch_type_names,
    ),
    Patch(
        "clipping",
        "clipping asserts the type name torch.cuda.FloatTensor",
        (("optimizer/clip_grads.py", "'torch.cuda.FloatTensor'"),),
        patch_clipping,
    ),
    Patch(
        "gradient norm",
        "in FP32 sums, weights depend on which gradients lie in one buffer: no run could be repeated with another one",
        (("optimizer/clip_grads.py", "total_norm = grad_norm**norm_type"),),
        patch_grad_norm,
    ),
    Patch(
        "Adam",
        "with torch.optim.AdamW the distributed optimizer cannot load a checkpoint",
        (
            ("optimizer/__init__.py", "USING_PYTORCH_OPTIMIZER = True"),
            ("optimizer/distrib_optimizer.py", "assert len(steps) == 1"),
        ),
        patch_adam,
    ),
    Patch(
        "checkpoint manager",
        "a spawned manager re-imports the program at the first save",
        (("dist_checkpointing/strategies/filesystem_async.py", "_results_queue = ctx.Manager().Queue()"),),
        patch_checkpoint_manager,
    ),
    Patch(
        "recompute without FP8",
        "fp8=False is taken for FP8 and asks for Transformer Engine",
        (("tensor_parallel/random.py", "self.fp8 = fp8 is not None"),),
        patch_recompute_without_fp8,
    ),
    Patch(
        "recomputed outputs",
        "the first recomputation compiles a C++ extension, and one killed meanwhile blocks all later runs",
        (("tensor_parallel/random.py", "_share_storage_ext = load_inline("),),
        patch_share_storage,
        versions=">=0.19",
    ),
    Patch(
        "buffers of two types",
        "gathered in one group, FP8 and BF16 weights come out as noise: gloo takes all for one type",
        (("distributed/param_and_grad_buffer.py", "group_buckets = [bucket] + non_fp8_buckets"),),
        patch_bucket_groups,
    ),
    Patch(
        "dummy wgrad",
        "with Transformer Engine installed, a fused wgrad returns a CUDA buffer to autograd",
        (("tensor_parallel/layers.py", "get_dummy_wgrad(list(weight.main_grad.shape), input.dtype)"),),
        patch_dummy_wgrad,
    ),
    *mixture_patches.CPU_PATCHES,
    Patch(
        "BF16 matmul",
        "without AVX-512, torch takes 10 to 60 times as long as in FP32",
        (
            ("tensor_parallel/layers.py", "torch.matmul(total_input, weight.t())"),
            ("tensor_parallel/layers.py", "grad_output.matmul(weight)"),
        ),
        patch_bf16_matmul,
    ),
)


@functools.cache
def install() -> None:
    """Filter warnings and, without a GPU, apply all patches. Call it before importing megatron-core."""
    silence_known_warnings()
    if torch.cuda.is_available():
        return
    apply_installed(PATCHES)
