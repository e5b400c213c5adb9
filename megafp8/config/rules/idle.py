"""Notices about settings of Megatron-LM that change nothing in this run, because another setting is not given.

Megatron-LM runs such command lines: its scripts and tests give one set of flags to many runs. A setting stays an error
(the rules) where the user most likely expects another model, precision or starting point than the run would have, and
where only megafp8 has the setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megafp8.config import derived, precision_map
from megafp8.config.muon import is_muon
from megafp8.config.schema import ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from megafp8.config.schema.moe import MixtureModelConfig, MixtureParallelConfig
from megafp8.config.settings import settings_by_name, value_of
from megafp8.recipes import registry


def idle_setting_notices(config: RunConfig) -> Iterator[str]:
    """One notice for each setting without effect."""
    yield from _checkpoint_notices(config)
    yield from _missing("--wandb-project", _wandb_settings(config))
    yield from _recompute_notices(config)
    yield from _missing("--fine-grained-activation-offloading", _offloading_settings(config))
    yield from _missing("--num-experts", _expert_settings(config))
    yield from _missing("--moe-token-dispatcher-type flex", _dispatcher_settings(config))
    yield from _missing("--position-embedding-type rope", _rotary_settings(config))
    yield from _missing("--lr-decay-style WSD", _wsd_settings(config))
    yield from _missing("--optimizer muon", _muon_settings(config))
    lowest = config.optimizer.decoupled_min_lr
    if lowest is not None and config.optimizer.decoupled_lr is None:
        yield f"--decoupled-min-lr {lowest:g} has no effect without --decoupled-lr"
    yield from _missing("--tp-comm-overlap", _tensor_overlap_settings(config))
    yield from _recipe_notices(config)
    interval = config.training.manual_gc_interval
    yield from _missing(
        "--manual-gc", {f"--manual-gc-interval {interval}": interval > 0 and not config.training.manual_gc}
    )
    steps = config.training.cuda_graph_warmup_steps
    if config.training.cuda_graph_impl == "none":
        given = {
            f"--cuda-graph-warmup-steps {steps}": steps != TrainingConfig().cuda_graph_warmup_steps,
            "--cuda-graph-evaluation": bool(config.training.cuda_graph_evaluation),
        }
        yield from _missing("--cuda-graph-impl local", given)
    first = config.training.start_eval_at_iter
    if config.training.eval_interval is None:
        yield from _missing("--eval-interval", {f"--start-eval-at-iter {first}": first is not None})
    if config.parallel.ddp_average_in_collective:
        yield (
            "--ddp-average-in-collective has no effect: gradients are summed over the ranks and divided by the number "
            "of tokens of the global batch, which is their average"
        )


def _missing(needs: str, is_given: Mapping[str, bool]) -> Iterator[str]:
    """The notices for those of several flags that are given, and have no effect without another."""
    return (f"{flag} has no effect without {needs}" for flag, given in is_given.items() if given)


def _muon_settings(config: RunConfig) -> Mapping[str, bool]:
    """The settings of Muon that another optimizer does not read; those with their default are not given."""
    if is_muon(config):
        return {}
    names = [name for name in OptimizerConfig.__dataclass_fields__ if name.startswith("muon_")]
    given = {}
    for setting in (settings_by_name()[f"optimizer.{name}"] for name in names):
        value = value_of(config, setting.name)
        if value != setting.default:
            given[setting.as_flag(value)] = True
    return given


def _expert_settings(config: RunConfig) -> Mapping[str, bool]:
    """The settings of experts that a dense model does not have; those with their default are not given."""
    if config.model.num_experts:
        return {}
    sections = (("model", MixtureModelConfig), ("parallel", MixtureParallelConfig))
    names = [f"{section}.{field}" for section, kind in sections for field in kind.__dataclass_fields__]
    given = {}
    for setting in (settings_by_name()[name] for name in names if name != "model.num_experts"):
        value = value_of(config, setting.name)
        shown = " ".join(map(str, value)) if setting.many else value
        given[setting.as_flag(shown)] = value != setting.default
    return given


def _dispatcher_settings(config: RunConfig) -> Mapping[str, bool]:
    parallel, default = config.parallel, MixtureParallelConfig()
    if not config.model.num_experts or parallel.moe_token_dispatcher_type == "flex":
        return {}
    backend, num_sms = parallel.moe_flex_dispatcher_backend, parallel.moe_flex_dispatcher_num_sms
    return {
        f"--moe-flex-dispatcher-backend {backend}": backend != default.moe_flex_dispatcher_backend,
        f"--moe-flex-dispatcher-num-sms {num_sms}": num_sms is not None,
    }


def _checkpoint_notices(config: RunConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        if checkpoint.save_interval is not None:
            yield f"--save-interval {checkpoint.save_interval} has no effect without --save: nothing is saved"
        retained = checkpoint.save_retain_interval
        saving = {
            f"--save-retain-interval {retained}": retained is not None,
            "--async-save": checkpoint.async_save,
            "--no-save-optim": checkpoint.no_save_optim,
            "--no-save-rng": checkpoint.no_save_rng,
        }
        yield from _missing("--save", saving)
    if checkpoint.load is None:
        loading = {
            "--no-load-optim": checkpoint.no_load_optim,
            "--no-load-rng": checkpoint.no_load_rng,
            "--use-checkpoint-opt_param-scheduler": checkpoint.use_checkpoint_opt_param_scheduler,
            "--override-opt_param-scheduler": checkpoint.override_opt_param_scheduler,
        }
        yield from _missing("--load", loading)


def _wandb_settings(config: RunConfig) -> dict[str, bool]:
    logging = config.logging
    if logging.wandb_project:
        return {}
    return {
        f"--wandb-entity {logging.wandb_entity}": bool(logging.wandb_entity),
        f"--wandb-exp-name {logging.wandb_exp_name}": bool(logging.wandb_exp_name),
        f"--wandb-save-dir {logging.wandb_save_dir}": bool(logging.wandb_save_dir),
    }


def _recompute_notices(config: RunConfig) -> Iterator[str]:
    training = config.training
    granularity = derived.recompute_granularity(training)
    if granularity != "full":
        full = {
            f"--recompute-method {training.recompute_method}": training.recompute_method is not None,
            f"--recompute-num-layers {training.recompute_num_layers}": training.recompute_num_layers is not None,
        }
        yield from _missing("--recompute-granularity full", full)
    modules = " ".join(training.recompute_modules)
    if granularity != "selective":
        yield from _missing("--recompute-granularity selective", {f"--recompute-modules {modules}": bool(modules)})


def _offloading_settings(config: RunConfig) -> dict[str, bool]:
    training, smallest = config.training, config.training.min_offloaded_tensor_size
    if training.fine_grained_activation_offloading:
        return {}
    return {
        f"--offload-modules {' '.join(training.offload_modules)}": bool(training.offload_modules),
        f"--min-offloaded-tensor-size {smallest}": smallest != TrainingConfig().min_offloaded_tensor_size,
    }


def _rotary_settings(config: RunConfig) -> dict[str, bool]:
    model, default = config.model, ModelConfig()
    if model.position_embedding_type in ("rope", "yarn"):
        return {}
    return {
        f"--rotary-base {model.rotary_base}": model.rotary_base != default.rotary_base,
        f"--rotary-percent {model.rotary_percent:g}": model.rotary_percent != default.rotary_percent,
        "--rotary-interleaved": model.rotary_interleaved,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor is not None,
    }


def _wsd_settings(config: RunConfig) -> dict[str, bool]:
    optimizer, default = config.optimizer, OptimizerConfig()
    if optimizer.lr_decay_style == "WSD":
        return {}
    style = optimizer.lr_wsd_decay_style
    return {
        f"--lr-wsd-decay-iters {optimizer.lr_wsd_decay_iters}": optimizer.lr_wsd_decay_iters is not None,
        f"--lr-wsd-decay-samples {optimizer.lr_wsd_decay_samples}": optimizer.lr_wsd_decay_samples is not None,
        f"--lr-wsd-decay-style {style}": style != default.lr_wsd_decay_style,
    }


def _tensor_overlap_settings(config: RunConfig) -> dict[str, bool]:
    parallel = config.parallel
    if parallel.tp_comm_overlap:
        return {}
    backend = parallel.tp_comm_bootstrap_backend
    return {
        "--tp-comm-overlap-cfg": parallel.tp_comm_overlap_cfg is not None,
        "--disable-tp-comm-overlap-ag": not parallel.tp_comm_overlap_ag,
        "--disable-tp-comm-overlap-rs": not parallel.tp_comm_overlap_rs,
        "--tp-comm-overlap-rs-dgrad": parallel.tp_comm_overlap_rs_dgrad,
        "--disable-tp-comm-bulk-dgrad": not parallel.tp_comm_bulk_dgrad,
        "--disable-tp-comm-bulk-wgrad": not parallel.tp_comm_bulk_wgrad,
        f"--tp-comm-bootstrap-backend {backend}": backend != "nccl",
    }


HISTORY_SETTINGS = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")


def _recipe_notices(config: RunConfig) -> Iterator[str]:
    """Settings of the amax history under a recipe that computes scales from the current values."""
    precision = config.precision
    used = [registry.get(name) for name in precision_map.used_recipes(precision)]
    if precision.fp8_format is None or any(set(HISTORY_SETTINGS) & set(recipe.setting_names) for recipe in used):
        return
    for setting in (settings_by_name()[f"precision.{name}"] for name in HISTORY_SETTINGS):
        value = value_of(config, setting.name)
        if value != setting.default:
            yield f"{setting.as_flag(value)} has no effect with {registry.get(precision.fp8_recipe).flag}"
