"""What the memory and the time of a run depend on, resolved once from settings that passed the checks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Optional

from megafp8.config import derived, dimensions, iterations, mixture, model_shapes, multi_token, stages, topology
from megafp8.config.fused_adam import fused_adam_problem
from megafp8.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, PrecisionConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class RunSizes:
    """Sizes of a run, of its ranks and of their parts of the model.

    Attributes:
        padded_vocab: vocabulary size after padding.
        layers: indices of the layers of each pipeline stage.
        stage_kinds: a stage of each kind, see `stages.kinds_of_stages`.
        linears: of a dense layer on one rank.
        replicas, expert_replicas: ranks with the same weights, or experts: data x context parallel.
        tokens: of one microbatch on one context-parallel rank.
        num_microbatches: of one data-parallel rank in a step.
        gathers_keys: context-parallel ranks gather the keys and values of all.
        uses_peers: experts get tokens through the memory of other GPUs.
        recompute_modules: of selective recomputation.
        recompute_method, recompute_num_layers: of full recomputation; the method is None without it.
        splits_layer_inputs: tensor-parallel ranks divide the inputs that full recomputation saves.
        has_one_pass_update: see `fused_adam_problem`.
        beside_graph: what runs eagerly in a run with a CUDA graph: `steps`, or only `evaluations`; None without them.
    """

    model: ModelConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    padded_vocab: int
    layers: tuple[tuple[int, ...], ...]
    stage_kinds: tuple[int, ...]
    linears: tuple[model_shapes.GemmDimensions, ...]
    replicas: int
    expert_replicas: int
    seq_length: int
    tokens: int
    num_microbatches: int
    gathers_keys: bool
    uses_peers: bool
    recompute_modules: tuple[str, ...]
    recompute_method: Optional[str]
    recompute_num_layers: Optional[int]
    splits_layer_inputs: bool
    has_one_pass_update: bool
    beside_graph: Optional[str]

    @property
    def tensor(self) -> int:
        """Tensor-parallel size."""
        return self.parallel.tensor_model_parallel_size

    @property
    def hidden_size(self) -> int:
        assert self.model.hidden_size is not None
        return self.model.hidden_size

    @property
    def residual_elements(self) -> int:
        """Elements of the residual stream of one microbatch on one rank: a shard with sequence parallelism."""
        return self.tokens * self.hidden_size // (self.tensor if self.parallel.sequence_parallel else 1)

    @property
    def is_even(self) -> bool:
        """Whether all stages have as many layers."""
        return len(set(map(len, self.layers))) == 1

    def is_last(self, stage: int) -> bool:
        """Whether a pipeline stage is the last one."""
        return stage == len(self.layers) - 1

    def depths_on(self, stage: int) -> int:
        """Modules of multi-token prediction on a stage: all on the last one."""
        return multi_token.num_depths(self.model) if self.is_last(stage) else 0

    def num_layers_on(self, stage: int) -> int:
        """Transformer layers of a stage, with those of multi-token prediction."""
        return len(self.layers[stage]) + self.depths_on(stage)


def run_sizes(config: RunConfig, world_size: int, padded_vocab: int) -> RunSizes:
    """Resolve the sizes of a run on some ranks.

    Raises:
        ConfigError: the ranks or the batch cannot be divided.
    """
    model, parallel, training, data = config.model, config.parallel, config.training, config.data
    context = parallel.context_parallel_size
    assert data.seq_length is not None and training.micro_batch_size is not None
    has_eager_steps = config.logging.fp8_log_interval is not None or training.fp8_guard != "off"
    beside = "steps" if has_eager_steps else "evaluations" if training.eval_iters else None
    return RunSizes(
        model=model,
        parallel=parallel,
        precision=config.precision,
        optimizer=config.optimizer,
        padded_vocab=padded_vocab,
        layers=tuple(tuple(itertools.chain(*chunks)) for chunks in stages.stage_layers(config)),
        stage_kinds=tuple(stages.kinds_of_stages(config)),
        linears=tuple(model_shapes.gemm_dimensions(config)),
        replicas=topology.data_parallel_size(config, world_size, with_context_parallel=True),
        expert_replicas=mixture.expert_data_size(config, world_size) if mixture.is_mixture(model) else 1,
        seq_length=data.seq_length,
        tokens=data.seq_length // context * training.micro_batch_size,
        num_microbatches=iterations.num_microbatches(config, world_size),
        gathers_keys=data.reset_attention_mask and context > 1 and dimensions.cp_exchange(config) == "allgather",
        uses_peers=mixture.token_dispatcher(config) == mixture.PEER,
        recompute_modules=derived.recompute_modules(training),
        recompute_method=training.recompute_method if training.recompute_granularity == "full" else None,
        recompute_num_layers=training.recompute_num_layers,
        splits_layer_inputs=training.distribute_saved_activations,
        has_one_pass_update=fused_adam_problem(config) is None,
        beside_graph=beside if derived.uses_cuda_graph(config) else None,
    )
