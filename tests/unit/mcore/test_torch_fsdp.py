"""The faults of megatron-core's FSDP2 wrapper that `mcore/torch_fsdp.py` works around still exist."""

import importlib
import inspect

from megatron.core.dist_checkpointing import optimizer
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
from megatron.core.transformer import mlp

from megafp8.mcore.patches import is_installed, rows_found_by_identity

IS_0_16 = is_installed("<0.19")


def test_the_mesh_has_cuda_devices_and_gradients_no_dtype() -> None:
    source = inspect.getsource(TorchFullyShardedDataParallel.__init__)
    assert 'DeviceMesh.from_group(self.process_group, "cuda")' in source
    assert "mp_policy" not in source


def test_gradients_of_norms_are_added_in_copies() -> None:
    gradients = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    source = inspect.getsource(gradients)
    assert "tensor.full_tensor()" in source and "def _unshard_if_dtensor(" in source
    assert "setattr(param, grad_attr, _reshard_if_dtensor(buf, orig_grad))" in source


def test_gradients_are_not_scaled() -> None:
    assert TorchFullyShardedDataParallel.scale_gradients is _BaseDataParallel.scale_gradients
    assert inspect.getsource(_BaseDataParallel.scale_gradients).rstrip().endswith("pass")


def test_finish_grad_sync_takes_no_options_in_0_16() -> None:
    parameters = list(inspect.signature(TorchFullyShardedDataParallel.finish_grad_sync).parameters)
    assert parameters == (["self"] if IS_0_16 else ["self", "force_all_reduce"])


def test_rows_of_gated_mlps_are_halved_on_every_rank_in_0_16() -> None:
    assert ("dp_sh_ten_build_fn" not in inspect.getsource(mlp.apply_swiglu_sharded_factory)) == IS_0_16


def test_the_context_restores_the_function() -> None:
    before = optimizer.to_local_if_dtensor
    with rows_found_by_identity():
        assert optimizer.to_local_if_dtensor is not before
    assert optimizer.to_local_if_dtensor is before
