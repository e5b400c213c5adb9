"""The patches that let megatron-core run on a CPU: each is still needed, and does only what it documents."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import types
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from megafp8.mcore import cpu_patches, patches
from megafp8.mcore.cpu_adam import Adam

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched beside a GPU")

cpu_patches.install()

EVIDENCE = [
    (patch.name, *evidence)
    for patch in cpu_patches.PATCHES
    if patches.is_installed(patch.versions)
    for evidence in patch.evidence
]
KNOWN_LOG_MESSAGES = [
    (logger, text) for logger, text, versions in cpu_patches.KNOWN_LOG_MESSAGES if patches.is_installed(versions)
]


def core_source(file: str) -> str:
    """Text of a file below megatron/core as it is installed."""
    return (patches.core_folder() / file).read_text(encoding="utf-8")


# ---- still needed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "file", "text"), EVIDENCE)
def test_megatron_core_still_needs_the_patch(name: str, file: str, text: str) -> None:
    assert text in core_source(file), f"megatron-core no longer has this: see whether the patch {name!r} can go"


@pytest.mark.parametrize("module", cpu_patches.MODULES_NAMING_CUDA)
def test_module_still_names_cuda(module: str) -> None:
    source = core_source(module.replace(".", "/") + ".py")
    assert any(text in source for text in ('"cuda"', "'cuda'", "pin_memory")), f"{module} needs no view of torch now"


@pytest.mark.parametrize(("logger", "text"), KNOWN_LOG_MESSAGES)
def test_known_messages_are_still_logged_and_filtered(logger: str, text: str) -> None:
    spec = importlib.util.find_spec(logger)
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert text in source, f"{logger} no longer has this: the entry can go"
    for message, passes in ((f"{text} here", False), ("another message", True)):
        record = logging.LogRecord(logger, logging.WARNING, "file", 1, message, None, None)
        assert bool(logging.getLogger(logger).filter(record)) == passes


def test_every_patch_has_a_reason() -> None:
    names = [patch.name for patch in cpu_patches.PATCHES]
    assert len(set(names)) == len(names)
    assert all(patch.reason and patch.evidence for patch in cpu_patches.PATCHES)


def test_false_is_still_treated_as_fp8() -> None:
    """The behaviour behind the last patch, on megatron-core's own class."""
    recompute = patches.import_core("tensor_parallel.random").CheckpointWithoutOutput
    assert recompute(fp8=False).fp8 is False, "patched"
    plain = recompute.__new__(recompute)
    recompute.__init__.__closure__[0].cell_contents(plain, False)
    assert plain.fp8 is True, "unchanged: fixed upstream, the patch can be removed"


# ---- once, and only here --------------------------------------------------------------------------------------------


def patched_functions() -> list[object]:
    distributed = patches.import_core("optimizer.distrib_optimizer")
    random = patches.import_core("tensor_parallel.random")
    return [
        torch.cuda.current_device,
        torch.Tensor.type,
        random.CheckpointWithoutOutput.__init__,
        distributed.DistributedOptimizer.__init__,
        patches.import_core("pipeline_parallel.schedules").torch,
    ]


def test_installing_twice_changes_nothing() -> None:
    before = patched_functions()
    cpu_patches.install()
    assert all(a is b for a, b in zip(patched_functions(), before, strict=True))


def test_nothing_is_patched_on_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    applied = []
    patch = patches.Patch("any", "any", (), lambda: applied.append(1))
    monkeypatch.setattr(cpu_patches, "PATCHES", (patch,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cpu_patches.install.__wrapped__()
    assert applied == []


# ---- the effect of each one
# -------------------------------------------------------------------------------------------


def test_torch_cuda_functions_return_cpu_values() -> None:
    assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    torch.cuda.synchronize()
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    assert torch.cuda.Event().query()
    assert torch.cuda.is_available() is False, "other libraries see no GPU"


def test_every_stub_is_a_function_of_its_own() -> None:
    """torch's tracer refuses one function under two names."""
    names = ("set_device", "synchronize", "empty_cache", "current_device", "get_rng_state", "set_rng_state")
    stubs = [getattr(torch.cuda, name) for name in names] + [torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop]
    assert len({id(stub) for stub in stubs}) == len(stubs)


def test_factories_of_the_named_modules_read_cuda_as_cpu() -> None:
    view = patches.import_core("optimizer.clip_grads").torch
    assert view.zeros(3, device="cuda").device.type == "cpu"
    assert view.tensor([1.0], dtype=torch.float64, device="cuda:0").dtype == torch.float64
    assert view.empty(3, pin_memory=True).shape == (3,)
    assert view.nn is torch.nn
    assert view.float32 is torch.float32
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(3, device="cuda")


def test_types_have_cuda_names_while_an_optimizer_is_built_only() -> None:
    with cpu_patches.cuda_type_names():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).type(torch.int32).dtype == torch.int32
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises(RuntimeError, match="inside"), cpu_patches.cuda_type_names():
        raise RuntimeError("inside")
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_clipping() -> None:
    def parameters() -> list[torch.Tensor]:
        held = [torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True), torch.zeros(1)]
        held[0].grad, held[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
        return held

    clipped, small = parameters(), parameters()
    clip = patches.import_core("optimizer.optimizer").clip_grad_by_total_norm_fp32
    clip(clipped, max_norm=1.0, total_norm=5.0)
    torch.testing.assert_close(clipped[0].grad, torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(clipped[1].grad, torch.tensor([0.8]))
    clip(small, max_norm=6.0, total_norm=5.0)
    assert small[1].grad.item() == 4.0, "a norm below the limit is left alone"


def test_gradient_norm_does_not_depend_on_the_sharding() -> None:
    """Over all gradients, over shards on two ranks, and over pieces, FP32 sums differ in the last bits."""
    gradients = torch.randn(100_003, generator=torch.Generator().manual_seed(1))

    def norm(num_pieces: int) -> float:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        mine = list(gradients.tensor_split(num_pieces))[rank::world]
        return patches.import_core("optimizer.optimizer").get_grad_norm_fp32(mine, grad_stats_parallel_group=None)

    exact = gradients.double().norm().float().item()
    found = [each for pieces in (2, 7, 1) for each in run_ranks(2, norm, pieces)]
    assert found == [exact] * 6


def mixed_gather() -> torch.Tensor:
    """Gather bytes and BF16 numbers in one group; returns the gathered bytes 0 and 1 of rank 0 and rank 1."""
    rank = torch.distributed.get_rank()
    codes, numbers = torch.zeros(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.bfloat16)
    codes[rank] = rank
    with torch.distributed._coalescing_manager(torch.distributed.group.WORLD):
        for buffer in (codes, numbers):
            torch.distributed.all_gather_into_tensor(buffer, buffer[rank : rank + 1])
    return codes


def test_gloo_still_treats_a_group_of_buffers_as_one_type() -> None:
    assert run_ranks(2, mixed_gather)[0].tolist() != [0, 1], "fixed in torch: check whether the patch can be removed"


def test_buffers_of_two_types_are_in_separate_groups() -> None:
    """The one with the embedding comes last, because gathers start there."""

    def groups(disable_bucketing: bool) -> list[list[torch.dtype]]:
        distributed = patches.import_core("distributed.distributed_data_parallel")
        config = patches.import_core("distributed").DistributedDataParallelConfig(use_distributed_optimizer=True)
        group = torch.distributed.group.WORLD
        buckets = [types.SimpleNamespace(params_list=[], dtype=dtype) for dtype in (torch.bfloat16, torch.uint8)]
        buffers = [
            types.SimpleNamespace(
                param_dtype=bucket.dtype,
                buckets=[bucket, bucket],
                ddp_config=config,
                data_parallel_group=group,
                data_parallel_world_size=2,
            )
            for bucket in buckets
        ]
        made = distributed.partition_buckets(buffers, force_single_bucket_group=disable_bucketing)
        return [[bucket.dtype for bucket in group.buckets] for group in made]

    codes, numbers = torch.uint8, torch.bfloat16
    assert run_ranks(2, groups, False)[0] == [[codes], [codes], [numbers], [numbers]]
    assert run_ranks(2, groups, True)[0] == [[codes, codes], [numbers, numbers]]


def test_dropout_streams_and_recomputation_share_the_cpu_generator() -> None:
    """A recomputed dropout drops the same elements, and later draws are as if nothing had been recomputed."""
    random = patches.import_core("tensor_parallel.random")

    def loss_and_next(is_recomputed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        random.model_parallel_cuda_manual_seed(5, force_reset_rng=True, tp_rank=0, ep_rank=0, etp_rank=0)
        x = torch.ones(64, requires_grad=True)

        def drop(x: torch.Tensor) -> torch.Tensor:
            with random.get_cuda_rng_tracker().fork():
                x = torch.nn.functional.dropout(x, 0.5)
            return torch.nn.functional.dropout(x, 0.5)

        y = random.checkpoint(drop, False, x) if is_recomputed else drop(x)
        y.sum().backward()
        return x.grad, torch.rand(4)

    plain, recomputed = loss_and_next(False), loss_and_next(True)
    assert 0 < (plain[0] == 0).sum() < 64
    assert torch.equal(plain[0], recomputed[0])
    assert torch.equal(plain[1], recomputed[1])


def test_streams_of_tensor_parallel_ranks_differ() -> None:
    random = patches.import_core("tensor_parallel.random")

    def draw(tensor_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        random.model_parallel_cuda_manual_seed(5, force_reset_rng=True, tp_rank=tensor_rank, ep_rank=0, etp_rank=0)
        with random.get_cuda_rng_tracker().fork():
            inside = torch.rand(4)
        return inside, torch.rand(4)

    (inside0, outside0), (inside1, outside1) = draw(0), draw(1)
    assert not torch.equal(inside0, inside1)
    assert torch.equal(outside0, outside1), "outside their region they draw alike"


def test_checkpoint_writers_queue_starts_no_program() -> None:
    def send_and_receive() -> str:
        writer = patches.import_core("dist_checkpointing.strategies.filesystem_async")
        get_queue = getattr(writer, "get_write_results_queue", None) or writer._get_write_results_queue
        queue = get_queue()
        queue.put("written")
        return queue.get(timeout=5)

    assert run_ranks(1, send_and_receive) == ["written"]


# ---- Adam -----------------------------------------------------------------------------------------------------------


def test_megatron_core_uses_this_adam() -> None:
    optimizers = importlib.import_module("megatron.core.optimizer")
    assert optimizers.Adam is Adam
    assert patches.import_core("optimizer.distrib_optimizer").Adam is Adam


def test_dummy_wgrad_lies_on_the_cpu_where_te_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = patches.import_core("tensor_parallel.layers")
    monkeypatch.setattr(layers, "HAVE_TE", True)
    monkeypatch.setattr(layers, "get_dummy_wgrad", None, raising=False)
    cpu_patches.patch_dummy_wgrad()
    dummy = layers.get_dummy_wgrad([2, 3], torch.bfloat16, zero=True)
    assert dummy.device.type == "cpu" and dummy.dtype == torch.bfloat16
    assert torch.equal(dummy, torch.zeros(2, 3, dtype=torch.bfloat16))
