"""Weights kept and gathered as FP8 codes: the same codes and the same run as with a gather in BF16."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from ranks import run_ranks
from small_run import VIRTUAL, Curve, SourceSamples, build_run, small_config, train
from test_checkpoint import OVERLAP, STEPS, load_newest, run_leg
from torch import Tensor

from megafp8.checkpoint.directory import find_checkpoint
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import finish_param_gather, save_checkpoint
from megafp8.checkpoint.state_dict import chained_optimizers
from megafp8.config.layer_backends import EMULATED
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import RunConfig
from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.fp8_parameter import WEIGHT, QuantizedParameter, quantized_parameters
from megafp8.quantization.quantize import quantize
from megafp8.resources.memory import estimate_memory
from megafp8.training.evaluation import build_batches, evaluate
from megafp8.training.extensions.calibration import calibrate, needs_calibration
from megafp8.training.extensions.step_records import params_norm
from megafp8.training.run import Run
from megafp8.training.step import train_step

GATHER = "--fp8-param-gather"
COMMON = "--num-layers 2 --bf16 --use-distributed-optimizer --micro-batch-size 2 --fp8-format hybrid"
TENSORWISE = f"{COMMON} --fp8-recipe tensorwise"
DELAYED = f"{COMMON} --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
BLOCKWISE = f"{COMMON} --fp8-recipe blockwise"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ENDS_IN_BF16 = "--num-layers 3 --first-last-layers-bf16"
ACCUMULATE = "--micro-batch-size 2 --global-batch-size 8"
# Rows and columns that 128 does not divide, and rank boundaries within rows and blocks.
RAGGED = "--hidden-size 144 --num-attention-heads 3 --group-query-attention --num-query-groups 1"


def curves(flags: str, world_size: int, num_steps: int) -> tuple[Curve, Curve]:
    """Without and with FP8 weights."""
    configs = [small_config("llama", f"{flags} {gather}", world_size) for gather in ("", GATHER)]
    plain, gathered = (run_ranks(world_size, curve_of, config, num_steps)[0] for config in configs)
    return plain, gathered


def curve_of(config: RunConfig, num_steps: int) -> Curve:
    """Train, from calibrated scales with delayed scaling. With the flag, some weight must be quantized."""
    run = build_run(config)
    assert bool(quantized_parameters(run.training_state.chunks)) == config.precision.fp8_param_gather
    if needs_calibration(run):
        calibrate(run, Progress())
    return train(run, num_steps)


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        pytest.param(f"{TENSORWISE} --no-gradient-accumulation-fusion", 1, id="tensorwise-one"),
        pytest.param(f"{TENSORWISE} {OVERLAP} {ENDS_IN_BF16}", 2, id="tensorwise-dp2-overlap-ends-in-bf16"),
        pytest.param(f"{TENSORWISE} {TENSOR} --fp8-amax-reduction all", 4, id="tensorwise-tp2-dp2-shared-scales"),
        pytest.param(f"{DELAYED} {OVERLAP} {ACCUMULATE} {RECOMPUTE}", 2, id="delayed-dp2-overlap-recompute"),
        pytest.param(f"{BLOCKWISE} {OVERLAP} {VIRTUAL}", 4, id="blockwise-pp2-virtual2-dp2-overlap"),
    ],
)
def test_fp8_gather_equals_bf16_gather(flags: str, world_size: int) -> None:
    """Bitwise. Gradients of two ranks have one possible sum; with more ranks it depends on their place in a buffer."""
    plain, gathered = curves(flags, world_size, 5)
    assert gathered == plain
    assert len(set(plain.losses)) == 5


def full_master_weights(run: Run) -> Iterator[tuple[QuantizedParameter, Tensor]]:
    """Each quantized weight of this rank, and the BF16 tensor that it should be quantized from."""
    for optimizer in chained_optimizers(run.training_state.optimizer):
        for weight in quantized_parameters(run.training_state.chunks):
            if any(weight in buffer.param_index_map for buffer in optimizer.buffers):
                yield weight, full_master_weight(optimizer, weight)


def full_master_weight(optimizer: Any, weight: QuantizedParameter) -> Tensor:
    """The master weight of all ranks of its optimizer, rounded to BF16. Collective over them."""
    pieces: list[Any] = [None] * dist.get_world_size(optimizer.data_parallel_group)
    mine = (0, torch.empty(0))
    if weight.main_param is not None:
        mine = (optimizer._get_model_param_range_map(weight)["param"].start, weight.main_param)
    dist.all_gather_object(pieces, mine, group=optimizer.data_parallel_group)
    master = torch.full((weight.numel(),), math.nan)
    for start, piece in pieces:
        master[start : start + len(piece)] = piece
    assert not master.isnan().any()
    return master.bfloat16().view(weight.shape)


def check_codes(run: Run) -> None:
    """Compare all codes and scales with those of the complete weights."""
    for weight, master in full_master_weights(run):
        codes, delayed = weight.codes, None
        if codes.delayed is not None:
            delayed = DelayedScale(codes.delayed.quant_scale[WEIGHT], torch.zeros(()))
        expected, found = quantize(master, codes.rule, delayed=delayed), codes.quantized()
        assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        assert torch.equal(found.dequant_scale, expected.dequant_scale)
        assert delayed is None or torch.equal(codes.amax, delayed.amax)


@pytest.mark.parametrize("flags", [TENSORWISE, DELAYED, BLOCKWISE], ids=["tensorwise", "delayed", "blockwise"])
def test_sharded_quantization_equals_that_of_the_full_weight(flags: str) -> None:
    """Quantized by shards on four ranks, after each step, and equal on all ranks."""
    config = small_config("llama", f"{flags} {RAGGED} {GATHER} --lr 1e-2 --micro-batch-size 1 --global-batch-size 4", 4)

    def steps() -> list[list[int]]:
        run, seen = build_run(config), []
        for step in range(1, 5):
            train(run, 1, step)
            check_codes(run)
            seen.append(
                [
                    hash(codes.raw.numpy().tobytes())
                    for codes in (weight.codes for weight in quantized_parameters(run.training_state.chunks))
                ]
            )
        return seen

    ranks = run_ranks(4, steps)
    assert ranks == [ranks[0]] * 4
    assert all(len({step[weight] for step in ranks[0]}) > 2 for weight in range(8)), "weights did not move"


def gathered_in_a_step(config: RunConfig) -> tuple[int, int, Run]:
    """Bytes of the second step: as the run counts them, and from what megatron-core passes to the collective."""
    run, seen = build_run(config), []
    train(run, 1)
    plain = dist.all_gather_into_tensor

    def gather(whole: Tensor, mine: Tensor, **options: Any) -> Any:
        seen.append(whole.nbytes - mine.nbytes)
        return plain(whole, mine, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.core.distributed.param_and_grad_buffer.dist_all_gather_func", gather)
        samples, batch = SourceSamples(config.data.seq_length), run.global_batch_size
        result = train_step(run, build_batches(run, samples, batch, 2 * batch, num_workers=0), Progress(1, batch))
    return result.metrics["param_gather_bytes"], sum(seen), run


@pytest.mark.parametrize(
    ("recipe", "side"), [(TENSORWISE, 10**9), (f"{BLOCKWISE} {OVERLAP}", 128)], ids=["tensorwise", "blockwise-overlap"]
)
def test_fp8_gather_halves_the_bytes(recipe: str, side: int) -> None:
    """Codes take half the bytes of BF16. A scale, one FP32 number per weight or block, takes at most as much."""

    def count(flags: str) -> tuple[int, int, list[torch.Size]]:
        counted, seen, run = gathered_in_a_step(small_config("llama", f"{recipe} {flags}", 2))
        return counted, seen, [weight.shape for weight in quantized_parameters(run.training_state.chunks)]

    plain, plain_seen, _ = run_ranks(2, count, "")[0]
    gathered, gathered_seen, shapes = run_ranks(2, count, GATHER)[0]
    elements, num_scales = sum(map(math.prod, shapes)), sum(-(-n // side) * -(-k // side) for n, k in shapes)
    assert plain == plain_seen
    assert gathered == gathered_seen + 4 * num_scales
    padding = 20 * 128
    assert plain - gathered_seen == pytest.approx(elements / 2, abs=padding)
    assert elements > 0.8 * plain / 2


def held_bytes(dtype: torch.dtype) -> int:
    """Bytes of all memory that tensors of a type occupy, except random states."""
    gc.collect()
    random_state = torch.get_rng_state().nbytes
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter) and each.dtype == dtype]
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for size in sizes.values() if size != random_state)


def test_a_weight_takes_one_byte_per_element() -> None:
    """Only what is gathered in BF16 is stored in BF16, and codes are stored once. The memory plan agrees."""

    def hold() -> tuple[list[int], list[int], int]:
        before = [held_bytes(dtype) for dtype in (torch.bfloat16, torch.uint8)]
        run = build_run(small_config("llama", f"{DELAYED} {GATHER}", 2))
        train(run, 2)
        after = [held_bytes(dtype) for dtype in (torch.bfloat16, torch.uint8)]
        buffers = {buffer.param_dtype: buffer.param_data for buffer in run.training_state.chunks[0].buffers}
        expected = [buffers[dtype].nbytes for dtype in (torch.bfloat16, torch.uint8)]
        planned = estimate_memory(run_sizes(run.config, 2, run.vocab_size), implementation=EMULATED)
        return [now - then for now, then in zip(after, before, strict=True)], expected, planned.weights_bytes

    for grown, expected, planned in run_ranks(2, hold):
        assert grown == expected
        assert sum(expected) == pytest.approx(planned, rel=0.01)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint, by its key."""
    path = str(find_checkpoint(folder)[1])
    wanted = dist_checkpointing.load_tensors_metadata(path)
    loaded = dist_checkpointing.load(wanted, path, validate_access_integrity=False)
    return {key: loaded[key] for key in wanted}


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        pytest.param(f"{DELAYED} {OVERLAP}", 2, id="delayed-dp2-overlap"),
        pytest.param(f"{BLOCKWISE} {TENSOR}", 2, id="blockwise-tp2"),
    ],
)
def test_checkpoints_load_with_and_without_fp8_weights(flags: str, world_size: int, tmp_path: Path) -> None:
    """The same tensors are saved, and both kinds of run resume from them as if they had not stopped."""
    without, gathers = (small_config("llama", f"{flags} {gather}", world_size) for gather in ("", GATHER))
    unbroken = run_ranks(world_size, run_leg, without, 2 * STEPS, None, None)[0].curve
    for config, name in ((without, "plain"), (gathers, "gathers")):
        run_ranks(world_size, run_leg, config, STEPS, None, tmp_path / name)
    for config in (without, gathers):
        leg = run_ranks(world_size, run_leg, config, STEPS, tmp_path / "gathers", None)[0]
        assert leg.curve.losses == unbroken.losses[STEPS:]
        assert leg.curve.grad_norms == unbroken.grad_norms[STEPS:]
    expected, found = (run_ranks(1, saved_tensors, tmp_path / name)[0] for name in ("plain", "gathers"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_resume_takes_no_view_of_a_quantized_weight(tmp_path: Path) -> None:
    """Transformer Engine's weights with scales of blocks have no views of another shape."""
    config = small_config("llama", f"{BLOCKWISE} {GATHER}", 1)
    dispatch = QuantizedParameter.__torch_dispatch__

    def refuse_views(function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.view.default and isinstance(args[0], QuantizedParameter):
            raise NotImplementedError("changes shape")
        return dispatch(function, types, args, kwargs)

    def save_and_load() -> bool:
        run = build_run(config)
        train(run, 1)
        path = save_checkpoint(tmp_path, config, run.training_state, Progress(1, 8))
        before = [weight.dequantize() for weight in quantized_parameters(run.training_state.chunks)]
        train(run, 1, first_step=2)
        with mock.patch.object(QuantizedParameter, "__torch_dispatch__", staticmethod(refuse_views)):
            load_checkpoint(path, config, run.training_state)
        after = [weight.dequantize() for weight in quantized_parameters(run.training_state.chunks)]
        return bool(before) and all(map(torch.equal, before, after))

    assert run_ranks(1, save_and_load) == [True]


def test_saving_and_reading_weights_do_not_change_training(tmp_path: Path) -> None:
    """Training continues after a save, a validation and a norm computation as if there had been none."""
    config = small_config("llama", f"{DELAYED} {OVERLAP} {GATHER}", 2)

    def steps(is_disturbed: bool) -> tuple[Curve, Curve]:
        run = build_run(config)
        before = train(run, 2)
        if is_disturbed:
            save_checkpoint(tmp_path, config, run.training_state, Progress(2, 2 * run.global_batch_size))
            evaluate(run, "valid", SourceSamples(config.data.seq_length), 2, 0)
            finish_param_gather(config.parallel, run.training_state)
            assert params_norm(run) > 0
        return before, train(run, 2, 3)

    assert run_ranks(2, steps, True) == run_ranks(2, steps, False)


def test_reported_loss_and_norm_equal_those_of_bf16_weights() -> None:
    """The validation loss, and the norm of the weights, whose squares are summed in another order."""

    def loss_and_norm(flags: str) -> tuple[float, float]:
        run = build_run(small_config("llama", f"{TENSORWISE} {TENSOR} --micro-batch-size 1 {flags}", 4))
        train(run, 2)
        loss = evaluate(run, "valid", SourceSamples(run.config.data.seq_length), 2, 0).loss
        return loss, params_norm(run)

    (loss, norm), (gathered_loss, gathered_norm) = (run_ranks(4, loss_and_norm, flags)[0] for flags in ("", GATHER))
    assert gathered_loss == loss
    assert gathered_norm == pytest.approx(norm, rel=1e-6)


def test_finetune_creates_new_master_weights(tmp_path: Path) -> None:
    """`--finetune` from a run with FP8 weights equals one from a run without, and does not start from decoded codes."""
    config = small_config("llama", f"{BLOCKWISE} {GATHER}", 2)
    run_ranks(2, run_leg, config, STEPS, None, tmp_path)

    def finetune(flags: str) -> Curve:
        run = build_run(small_config("llama", f"{BLOCKWISE} {flags}", 2))
        load_newest(run, tmp_path, weights_only=True)
        return train(run, STEPS)

    assert run_ranks(2, finetune, GATHER) == run_ranks(2, finetune, "")
