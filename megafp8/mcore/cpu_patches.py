"""What megatron-core 0.16.1 needs in order to run on a CPU build of torch. Only here is it patched for that.

megatron-core names CUDA in three ways: it calls functions of `torch.cuda` that raise on a CPU build, it writes
`device="cuda"` into factory calls, and it tells parameter kinds apart by the text `torch.cuda.FloatTensor`. The first
is mended by giving `torch.cuda` CPU answers, the second by handing the modules concerned a view of `torch` whose
factories read "cuda" as "cpu", the third by renaming types inside two constructors. No patch costs anything per
operation, and none is installed where there is a GPU.

Every patch says what in megatron-core needs it: `evidence` names a file and the text in it. A test fails when a text
is gone, so that a patch does not outlive its reason."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megafp8.mcore.cpu_adam import Adam
from megafp8.mcore.patches import Patch, core

CPU = torch.device("cpu")


class InOrderStream:
    """A stream or event of a device that does one thing after the other: every wait is already satisfied."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for."""

    wait_event = record = wait = wait_stream

    def record_event(self, event: Any = None) -> "InOrderStream":
        """The stream itself serves as its event."""
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True


def answer_for_cuda() -> None:
    """Give `torch.cuda` the CPU's answers. Each name gets a function of its own: torch's tracer rejects duplicates."""
    cuda, stream = torch.cuda, InOrderStream()
    cuda.current_device = lambda: CPU
    for owner, name in (
        (cuda, "set_device"),
        (cuda, "synchronize"),
        (cuda, "empty_cache"),
        (cuda.nvtx, "range_push"),
        (cuda.nvtx, "range_pop"),
    ):
        setattr(owner, name, lambda *args, **kwargs: None)
    cuda.Stream, cuda.Event = InOrderStream, type("InOrderEvent", (InOrderStream,), {})
    cuda.current_stream, cuda.default_stream = (lambda device=None: stream), (lambda device=None: stream)
    cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def share_the_cpu_generator() -> None:
    """Random state of the "GPU" is the CPU generator's, so that the dropout tracker and recomputation work."""
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.default_generator.manual_seed
    random = core("tensor_parallel.random")
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # megatron-core warns when the CPU state moves inside a "GPU" context; here the two are one.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in str(record.msg))


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
    """`torch` as the modules above see it: factories make CPU tensors where "cuda" is asked for."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in FACTORIES:
            value = on_cpu(value)
        self.__dict__[name] = value
        return value


def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory with device "cuda" read as the CPU and pinned memory left out."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def read_cuda_as_cpu() -> None:
    """Hand the modules that name CUDA in factory calls the view of torch above."""
    view = TorchOnCpu("torch")
    for module in MODULES_NAMING_CUDA:
        core(module).torch = view


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Within, `tensor.type()` says `torch.cuda.FloatTensor` for a CPU tensor."""
    plain = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = cuda_type
    try:
        yield
    finally:
        torch.Tensor.type = plain


def name_types_as_cuda() -> None:
    """The two optimizers that sort parameters by type name are built with CUDA's names."""
    for module, name in (
        ("optimizer.optimizer", "Float16OptimizerWithFloat16Params"),
        ("optimizer.distrib_optimizer", "DistributedOptimizer"),
    ):
        optimizer = getattr(core(module), name)
        optimizer.__init__ = cuda_type_names()(optimizer.__init__)


def clip_by_total_norm(
    parameters: list[torch.Tensor], max_norm: float, total_norm: float, use_decoupled_grad: bool = False
) -> None:
    """Scale gradients so that their global norm is at most `max_norm`, as megatron-core does on a GPU."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    factor = max_norm / (total_norm + 1.0e-6)
    if factor < 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)


def total_norm(gradients: list[torch.Tensor], norm_type: float = 2.0, grad_stats_parallel_group: Any = None) -> float:
    """L2 norm over the ranks of a group, an FP32 number.

    Numerics: squares of FP32 numbers are exact in FP64, and their sum is as good as exact before it is rounded, so that
    it does not show how the gradients are divided among tensors and ranks.
    """
    assert norm_type == 2.0
    squares = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        squares += torch.linalg.vector_norm(gradient.double()).square()
    torch.distributed.all_reduce(squares, group=grad_stats_parallel_group)
    return squares.sqrt().float().item()


def sum_norm_in_fp64() -> None:
    """Clipping carries the last bit of the norm into every weight."""
    core("optimizer.optimizer").get_grad_norm_fp32 = total_norm


def clip_without_type_check() -> None:
    """megatron-core's clipping asserts CUDA's type name on every gradient."""
    core("optimizer.optimizer").clip_grad_by_total_norm_fp32 = clip_by_total_norm


def keep_adam_step_in_group() -> None:
    """Offer our Adam in the place where megatron-core looks for FusedAdam."""
    optimizers, distributed = core("optimizer"), core("optimizer.distrib_optimizer")
    optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = Adam, False
    distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_TE_OPTIMIZER = Adam, True, True


@functools.cache
def results_queue() -> Any:
    """The queue between a checkpoint's writers and the trainer, from a forked manager."""
    return multiprocessing.get_context("fork").Manager().Queue()


def fork_checkpoint_manager() -> None:
    """The spawned manager imports the program again: seconds at the first save, and a hang without a main guard."""
    core("dist_checkpointing.strategies.filesystem_async")._get_write_results_queue = results_queue


def read_false_as_no_fp8() -> None:
    """Recomputing norms asks TE for its FP8 state even when `fp8=False`, because `False is not None`."""
    recompute = core("tensor_parallel.random").CheckpointWithoutOutput
    plain = recompute.__init__
    recompute.__init__ = lambda self, fp8=False: plain(self, fp8 or None)


def keep_types_of_buffers_apart() -> None:
    """Give each buffer groups of its own. Groups are gathered from the last one on: the embedding's is that."""
    distributed = core("distributed.distributed_data_parallel")
    plain = distributed.partition_buckets

    def partition(buffers: list[Any], **options: Any) -> list[Any]:
        in_order = sorted(buffers, key=lambda buffer: buffer.param_dtype != torch.uint8)
        return [group for buffer in in_order for group in plain([buffer], **options)]

    distributed.partition_buckets = partition


PATCHES = (
    Patch(
        "torch.cuda functions",
        "current_device, streams, events and Tensor.cuda raise on a CPU build",
        (
            ("distributed/param_and_grad_buffer.py", "torch.cuda.current_device()"),
            ("pipeline_parallel/p2p_communication.py", "torch.cuda.current_device()"),
            ("pipeline_parallel/p2p_communication.py", "torch.cuda.synchronize()"),
            ("distributed/param_and_grad_buffer.py", "torch.cuda.default_stream()"),
            ("models/common/language_module/language_module.py", ".cuda()"),
        ),
        answer_for_cuda,
    ),
    Patch(
        "random state",
        "the dropout tracker and recomputation save and restore a CUDA generator",
        (
            ("tensor_parallel/random.py", "torch.cuda.get_rng_state()"),
            ("tensor_parallel/random.py", "torch.cuda.manual_seed(seed)"),
        ),
        share_the_cpu_generator,
    ),
    Patch(
        "literal device",
        "factories are called with device=\"cuda\" or device='cuda'",
        (
            ("pipeline_parallel/schedules.py", 'device="cuda"'),
            ("optimizer/optimizer.py", "device='cuda'"),
            ("optimizer/clip_grads.py", "device='cuda'"),
        ),
        read_cuda_as_cpu,
    ),
    Patch(
        "type names",
        "optimizers refuse parameters whose type is not named torch.cuda.*",
        (
            ("optimizer/optimizer.py", "'torch.cuda.FloatTensor'"),
            ("optimizer/distrib_optimizer.py", "'torch.cuda.FloatTensor'"),
        ),
        name_types_as_cuda,
    ),
    Patch(
        "clipping",
        "clipping asserts the type name torch.cuda.FloatTensor",
        (("optimizer/clip_grads.py", "'torch.cuda.FloatTensor'"),),
        clip_without_type_check,
    ),
    Patch(
        "gradient norm",
        "in FP32 sums, weights depend on which gradients lie in one buffer: no run could be repeated with another one",
        (("optimizer/clip_grads.py", "total_norm = grad_norm**norm_type"),),
        sum_norm_in_fp64,
    ),
    Patch(
        "Adam",
        "with torch.optim.AdamW the distributed optimizer cannot load a checkpoint",
        (
            ("optimizer/__init__.py", "USING_PYTORCH_OPTIMIZER = True"),
            ("optimizer/distrib_optimizer.py", "assert len(steps) == 1"),
        ),
        keep_adam_step_in_group,
    ),
    Patch(
        "checkpoint manager",
        "a spawned manager re-imports the program at the first save",
        (("dist_checkpointing/strategies/filesystem_async.py", 'get_context("spawn")'),),
        fork_checkpoint_manager,
    ),
    Patch(
        "recompute without FP8",
        "fp8=False is taken for FP8 and asks for Transformer Engine",
        (("tensor_parallel/random.py", "self.fp8 = fp8 is not None"),),
        read_false_as_no_fp8,
    ),
    Patch(
        "buffers of two types",
        "gathered in one group, FP8 and BF16 weights come out as noise: gloo takes all for one type",
        (("distributed/param_and_grad_buffer.py", "group_buckets = [bucket] + non_fp8_buckets"),),
        keep_types_of_buffers_apart,
    ),
)
QUIET = (
    (UserWarning, r".*Apex (is|are) not installed.*", r"megatron\.core\..*"),
    (UserWarning, r"Transformer Engine.* not installed.*", r"megatron\.core\..*"),
    (UserWarning, r"full scope is deprecated", r"megatron\.core\.transformer\.transformer_config"),
    (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer\..*"),
    (UserWarning, r"mxfp8 without using reuse_grad_buf", r"megatron\.core\.optimizer\..*"),
    (RuntimeWarning, r"Detected a Jax installation", r"transformer_engine"),
    (FutureWarning, r"`torch\.distributed\..*` is deprecated", r"torch\.distributed\.c10d_logger"),
    (FutureWarning, r"Please use DTensor instead", r"torch\.distributed\.checkpoint\..*"),
    (FutureWarning, r"`load_state_dict` is deprecated", r"megatron\.core\.dist_checkpointing\..*"),
    (FutureWarning, r"`load_state_dict` is deprecated", r"megafp8\.checkpoint\.safe_load"),
)


def silence_known_warnings() -> None:
    """Leave out what megatron-core says on every run and no user can act on."""
    for category, message, module in QUIET:
        warnings.filterwarnings("ignore", category=category, message=message, module=module)
    # Made-up data has no index worth keeping.
    datasets = logging.getLogger("megatron.core.datasets.gpt_dataset")
    datasets.addFilter(lambda record: "path_to_cache is None" not in str(record.msg))


@functools.cache
def install() -> None:
    """Make megatron-core ready for this machine. Call before anything else imports it; a second call does nothing."""
    silence_known_warnings()
    if torch.cuda.is_available():
        return
    # megatron-core wraps functions in torch.compile at import, which needs a C++ compiler on a CPU and 10 s.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    answer_for_cuda()
    for patch in PATCHES:
        patch.apply()
