"""The memory estimate compared with the paper's formulas, measured peaks, and itself."""

import pytest

from megafp8.config import dimensions, model_shapes
from megafp8.config.layer_backends import EMULATED, TRANSFORMER_ENGINE
from megafp8.config.model_shapes import PRESETS
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.resources.memory import (
    cuda_graph_memory_bytes,
    estimate_memory,
    estimate_stages,
    layer_activations,
    layers_in_flight,
    parameters_on_stage,
)
from megafp8.resources.mixture_memory import COMMUNICATOR_BYTES, non_torch_bytes

GIB = 2**30
IMPLEMENTATIONS = (TRANSFORMER_ENGINE, EMULATED)
GPT = {
    "model.num_layers": 8,
    "model.hidden_size": 256,
    "model.num_attention_heads": 8,
    "model.max_position_embeddings": 128,
    "data.seq_length": 128,
    "training.micro_batch_size": 4,
    "training.global_batch_size": 64,
    "precision.bf16": True,
    "precision.attention_backend": "unfused",
    "training.train_iters": 1,
}
SBH = 128 * 4 * 256
SCORES = 5 * 8 * 128 / 256  # 5 a s / h


def config_of(**changes):
    names = {name.replace("__", "."): value for name, value in changes.items()}
    return with_values(RunConfig(), GPT | names)


def test_activations_of_a_layer_match_the_paper():
    assert layer_activations(run_sizes(config_of(), 8, 1024)).total == SBH * (34 + SCORES)


def test_activations_with_tensor_parallelism_match_the_paper():
    config = config_of(parallel__tensor_model_parallel_size=4)
    assert layer_activations(run_sizes(config, 8, 1024)).total == SBH * (10 + 24 / 4 + SCORES / 4)


def test_activations_with_sequence_parallelism_match_the_paper():
    config = config_of(parallel__tensor_model_parallel_size=4, parallel__sequence_parallel=True)
    assert layer_activations(run_sizes(config, 8, 1024)).total == SBH / 4 * (34 + SCORES)


def test_selective_recompute_matches_the_paper():
    layer = layer_activations(run_sizes(config_of(), 8, 1024))
    assert layer.after_selective_recompute(("core_attn",)) == SBH * 34


def test_saved_activations_are_codes_and_scales():
    """17/16 bytes in place of 2, for the inputs of the norms and of the activation function."""
    plain = layer_activations(run_sizes(config_of(), 8, 1024))
    norm = layer_activations(run_sizes(config_of(precision__fp8_saved_activations=("norm",)), 8, 1024))
    both = layer_activations(run_sizes(config_of(precision__fp8_saved_activations=("norm", "activation")), 8, 1024))
    assert plain.total - norm.total == plain.residual_stream - norm.residual_stream == 2 * SBH * 15 / 16
    assert norm.total - both.total == norm.mlp - both.mlp == 4 * SBH * 15 / 16


def test_an_unpacked_activation_exists_in_the_backward_pass():
    stage = {"parallel__pipeline_model_parallel_size": 2, "model__num_layers": 8}
    plain, packed = (
        estimate_memory(run_sizes(config_of(**stage, precision__fp8_saved_activations=parts), 2, 1024))
        for parts in ((), ("activation",))
    )
    assert packed.buffers_bytes - plain.buffers_bytes == 2 * 4 * SBH


def test_full_recompute_keeps_the_input_of_each_layer():
    config = config_of(
        training__recompute_granularity="full",
        training__recompute_method="uniform",
        training__recompute_num_layers=1,
        model__hidden_dropout=0.0,
    )
    layer = layer_activations(run_sizes(config, 8, 1024))
    assert layer.layer_input == 2 * SBH
    assert estimate_memory(run_sizes(config, 1, 1024)).activations_bytes == 8 * 2 * SBH + layer.total
    in_block = with_values(config, {"training.recompute_method": "block", "training.recompute_num_layers": 8})
    assert estimate_memory(run_sizes(in_block, 1, 1024)).activations_bytes == 8 * 2 * SBH + layer.total


def test_keys_that_ranks_gather_are_saved_up_to_the_end_of_each_piece():
    def attention(kind, implementation=TRANSFORMER_ENGINE):
        config = config_of(
            data__reset_attention_mask=True, parallel__context_parallel_size=4, parallel__cp_comm_type=kind
        )
        return layer_activations(run_sizes(config, 8, 1024), implementation=implementation).attention

    own = 2 * 2 * SBH / 4  # keys and values of a rank's two of eight pieces; of a rank with pieces 1 and 6, 2 + 7
    assert attention("allgather") - attention("a2a") == own / 2 * 9 - own
    assert attention("p2p", EMULATED) == attention("a2a", EMULATED)


def test_flash_attention_saves_no_score_matrix():
    flash = layer_activations(run_sizes(config_of(precision__attention_backend="flash"), 8, 1024))
    assert flash.core_attention == 128 * 4 * 8 * 4


@pytest.mark.parametrize(
    ("stages", "chunks", "stage", "layers"),
    [
        (1, None, 0, 8),
        (2, None, 0, 2 * 4),
        (2, None, 1, 4),
        (4, None, 0, 4 * 2),
        (4, None, 3, 2),
        (4, 2, 0, 8 * (1 + 3 / (4 * 2))),  # L (1 + (p - 1) / (p m)): Korthikanti et al., section 4.2.3
        (4, 2, 3, (0 + 4 + 1) * 1),
    ],
)
def test_layers_in_flight(stages, chunks, stage, layers):
    config = config_of(
        parallel__pipeline_model_parallel_size=stages, parallel__num_virtual_stages_per_pipeline_rank=chunks
    )
    assert layers_in_flight(run_sizes(config, stages, 1024), stage) == layers


def test_few_microbatches_limit_the_layers_in_flight():
    config = config_of(parallel__pipeline_model_parallel_size=4, training__global_batch_size=8)
    assert layers_in_flight(run_sizes(config, 4, 1024), 0) == 2 * 2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_parameters_of_all_ranks_add_up_to_the_model(tensor, stages, tied):
    config = config_of(
        parallel__tensor_model_parallel_size=tensor,
        parallel__pipeline_model_parallel_size=stages,
        model__share_embeddings_and_output_weights=tied,
    )
    held = sum(sum(parameters_on_stage(run_sizes(config, tensor * stages, 1024), stage)) for stage in range(stages))
    count = model_shapes.count_parameters(config.model, 1024)
    split = (
        count.num_layers
        * (count.attention_weights_per_layer + count.mlp_weights_per_layer + count.biases_per_layer - 2 * 256)
        + count.word_embeddings
        + count.output_layer
    )
    tied_copy = count.word_embeddings if tied and stages > 1 else 0
    assert held == count.total - split + (split + tied_copy) // tensor


def test_optimizer_is_sharded_over_data_and_context_ranks():
    whole = estimate_memory(run_sizes(config_of(), 4, 1024))
    assert whole.weights_bytes == 2 * whole.parameters
    assert whole.gradients_bytes == 4 * whole.parameters
    assert whole.optimizer_bytes == 12 * whole.parameters
    sharded = config_of(parallel__use_distributed_optimizer=True, parallel__context_parallel_size=2)
    assert estimate_memory(run_sizes(sharded, 4, 1024)).optimizer_bytes == whole.optimizer_bytes // 4


@pytest.mark.parametrize(
    ("changes", "bytes_per_parameter"),
    [
        ({"precision__bf16": False}, 4 + 4 + 8),
        ({"optimizer__optimizer": "sgd"}, 2 + 4 + 8),
        ({"precision__grad_reduce_in_bf16": True}, 2 + 2 + 16),
        ({"precision__grad_reduce_in_fp8": True, "precision__grad_reduce_fp8_error_feedback": True}, 2 + 8 + 12),
        (
            {
                "optimizer__use_precision_aware_optimizer": True,
                "parallel__use_distributed_optimizer": True,
                "optimizer__exp_avg_dtype": "fp8",
                "optimizer__exp_avg_sq_dtype": "bf16",
            },
            2 + 4 + 2 + 1 + 2,
        ),
    ],
)
def test_bytes_per_parameter(changes, bytes_per_parameter):
    estimate = estimate_memory(run_sizes(config_of(**changes), 1, 1024))
    parts = estimate.weights_bytes + estimate.gradients_bytes + estimate.optimizer_bytes
    assert parts == bytes_per_parameter * estimate.parameters


def test_fp8_halves_saved_inputs_and_keeps_copies_of_weights():
    plain = config_of(precision__attention_backend="flash")
    fp8 = with_values(plain, {"precision.fp8_format": "hybrid"})
    saved = [layer_activations(run_sizes(each, 8, 1024)).norm_outputs for each in (fp8, plain)]
    assert saved[0] * 2 == saved[1]
    without_wgrad = with_values(fp8, {"precision.fp8_wgrad": False})
    assert layer_activations(run_sizes(without_wgrad, 8, 1024)) == layer_activations(run_sizes(plain, 8, 1024))
    quantizable, other = parameters_on_stage(run_sizes(fp8, 1, 1024), 0)
    assert estimate_memory(run_sizes(fp8, 1, 1024)).fp8_copies_bytes == 2 * quantizable
    assert estimate_memory(run_sizes(fp8, 1, 1024), implementation=EMULATED).fp8_copies_bytes == quantizable
    gather = with_values(fp8, {"precision.fp8_param_gather": True})
    gathered, emulated = (estimate_memory(run_sizes(gather, 1, 1024), implementation=name) for name in IMPLEMENTATIONS)
    assert (gathered.weights_bytes, gathered.fp8_copies_bytes) == (2 * quantizable + 2 * other, 0)
    assert (emulated.weights_bytes, emulated.fp8_copies_bytes) == (quantizable + 2 * other, 0)


@pytest.mark.parametrize(("stages", "stage", "excluded"), [(1, 0, 3), (2, 0, 1), (2, 1, 2), (4, 1, 0)])
def test_layers_in_high_precision_have_no_copies(stages, stage, excluded):
    config = config_of(
        precision__fp8_format="hybrid",
        parallel__pipeline_model_parallel_size=stages,
        precision__first_last_layers_bf16=True,
        precision__num_layers_at_end_in_bf16=2,
    )
    layers = 8 // stages
    quantizable, _ = parameters_on_stage(run_sizes(config, stages, 1024), stage)
    estimate = estimate_memory(run_sizes(config, stages, 1024), stage=stage, implementation=EMULATED)
    assert estimate.fp8_copies_bytes == quantizable * (layers - excluded) // layers


def test_memory_of_first_and_last_pipeline_stages():
    config = config_of(parallel__pipeline_model_parallel_size=4)
    first, last = estimate_stages(run_sizes(config, 4, 1024))
    assert first.logits_bytes == 0 < last.logits_bytes
    assert first.activations_bytes > last.activations_bytes
    assert len(estimate_stages(run_sizes(config_of(), 1, 1024))) == 1
    assert sum(first.parts().values()) == first.total_bytes


SHAPE_B = {
    "model.num_layers": 8,
    "model.hidden_size": 4096,
    "model.num_attention_heads": 32,
    "model.ffn_hidden_size": 14_336,
    "model.group_query_attention": True,
    "model.num_query_groups": 8,
    "model.vocab_size": 50_304,
    "data.seq_length": 4096,
    "training.micro_batch_size": 2,
}
SHAPE_A = {"data.seq_length": 2048, "training.micro_batch_size": 8}
FP8 = {"precision.fp8_format": "hybrid", "precision.fp8_recipe": "delayed"}


@pytest.mark.parametrize(
    ("shape", "fp8", "measured_gib"),
    [(SHAPE_A, {}, 52.1), (SHAPE_A, FP8, 51.6), (SHAPE_B, {}, 47.2), (SHAPE_B, FP8, 49.3)],
)
def test_measured_peaks(shape, fp8, measured_gib):
    """One H200, megatron-core with the distributed optimizer and TE's fused loss."""
    common = {
        "precision.bf16": True,
        "parallel.use_distributed_optimizer": True,
        "training.train_iters": 1,
        "precision.cross_entropy_loss_fusion": True,
        "precision.cross_entropy_fusion_impl": "te",
    }
    config = with_values(RunConfig(), PRESETS["llama-1b"] | shape | common | fp8)
    estimate = estimate_memory(run_sizes(config, 1, dimensions.padded_vocab_size(config, 50_304)))
    assert estimate.total_bytes / GIB == pytest.approx(measured_gib, rel=0.005)


def test_a_stage_without_logits_holds_the_gradients_of_a_layer():
    first, last = estimate_stages(run_sizes(config_of(parallel__pipeline_model_parallel_size=4), 4, 1024))
    assert first.buffers_bytes == 2 * 128 * 4 * (2 * 256 + 2 * 1024)
    assert last.buffers_bytes == max(0, first.buffers_bytes - last.logits_bytes)


def test_eager_steps_beside_a_graph_have_their_own_memory():
    def beside(**changes):
        config = config_of(**changes)
        estimate = estimate_memory(run_sizes(config, 1, 1024))
        return cuda_graph_memory_bytes(run_sizes(config, 1, 1024), estimate), estimate

    graph = {"training__cuda_graph_impl": "local"}
    looked, estimate = beside(**graph, logging__fp8_log_interval=100)
    assert looked == estimate.total_bytes - estimate.weights_bytes - estimate.gradients_bytes - estimate.optimizer_bytes
    validated, estimate = beside(**graph)
    assert validated == estimate.logits_bytes + layer_activations(run_sizes(config_of(), 8, 1024)).total < looked
    assert beside(**graph, training__eval_iters=0)[0] == beside(logging__fp8_log_interval=100)[0] == 0


def test_memory_outside_torch_grows_with_the_groups():
    alone = non_torch_bytes(config_of(), 1)
    assert non_torch_bytes(config_of(), 4) == alone + 2 * COMMUNICATOR_BYTES  # data parallel, and the world
    both = config_of(parallel__tensor_model_parallel_size=2, parallel__pipeline_model_parallel_size=2)
    assert non_torch_bytes(both, 4) == alone + 3 * COMMUNICATOR_BYTES
