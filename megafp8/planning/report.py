"""Reports of a plan, as text and as JSON data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from megafp8.config import flags, iterations
from megafp8.config.settings import settings_by_name
from megafp8.planning.communication import NETWORK_FRACTION
from megafp8.planning.host_memory import checkpoint_memory, host_memory_text
from megafp8.planning.layouts import PlannedLayout
from megafp8.planning.plan import Plan, scaling_limits
from megafp8.planning.planned_run import CALIBRATION
from megafp8.planning.step_time import bytes_by_group
from megafp8.resources.mixture_memory import FREE_MEMORY_FRACTION
from megafp8.utils.formatting import text_table

GIB = 2**30
PARTS_BELOW_FRACTION = 0.005
"""The text omits parts of a step below this fraction."""


def plan_text(plan: Plan, top: int) -> str:
    """The complete plan as text, with the `top` fastest layouts."""
    search = plan.search
    head = (
        f"{search.world_size} x {plan.gpu.name}: {search.num_legal} legal layouts, {len(search.layouts)} fit in "
        f"{plan.gpu.memory_bytes / GIB:.1f} GiB"
    )
    if not search.layouts:
        assert search.smallest_bytes is not None
        needs = (
            f"the smallest needs {search.smallest_bytes / GIB:.1f} GiB per GPU: use more GPUs, or a smaller micro-batch"
        )
        return "\n\n".join([head, *plan.warnings, needs, *scaling_sections(plan), assumptions_text(plan)])
    best = search.layouts[0]
    sections = [
        head,
        *plan.warnings,
        text_table(
            ("", "layout", "tokens/s/GPU", "MFU", "step s", "GiB"),
            [(str(number), *layout_cells(layout)) for number, layout in enumerate(search.layouts[:top], start=1)],
            "rl",
        ),
        "memory of layout 1, GiB on the GPU that needs most\n  " + bytes_text(memory_parts(best), GIB),
        "host memory of layout 1 for checkpoints\n  " + host_text(best),
        "step time of layout 1\n  " + step_text(best),
        "communication of layout 1, GB sent per GPU and step\n  "
        + (bytes_text(bytes_by_group(best.run), 1e9) or "nothing"),
        *scaling_sections(plan),
        assumptions_text(plan),
        "flags of layout 1\n  " + " \\\n  ".join(command_lines(best)),
    ]
    return "\n\n".join(sections)


def layout_cells(layout: PlannedLayout) -> tuple[str, ...]:
    """A layout's cells in the table of layouts."""
    step = layout.step
    return (
        layout.name, f"{step.tokens_per_s_per_gpu:,.0f}", f"{step.mfu_fraction:.1%}", f"{step.seconds:.3f}",
        f"{layout.memory_bytes / GIB:.1f}",
    )  # fmt: skip


def memory_parts(layout: PlannedLayout) -> dict[str, int]:
    """Memory by part, in bytes."""
    parts = layout.memory.parts()
    parts |= {"beside the graph": layout.cuda_graph_bytes, "context and NCCL": layout.non_torch_bytes}
    return {name: size for name, size in parts.items() if size}


def host_text(layout: PlannedLayout) -> str:
    """Host memory of the rank that needs most memory on its GPU, to resume and to save."""
    run = layout.run
    return host_memory_text([checkpoint_memory(run.config, run.world_size, run.padded_vocab, layout.memory)])


def step_text(layout: PlannedLayout) -> str:
    """Step time by part, in percent."""
    seconds = layout.step.seconds
    parts = sorted(layout.step.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {part / seconds:.1%}" for name, part in parts if part > PARTS_BELOW_FRACTION * seconds)


def bytes_text(parts: Mapping[str, float], unit: float) -> str:
    """Numbers of bytes by name, in a unit such as `GIB`."""
    return ", ".join(f"{name} {num_bytes / unit:.2f}" for name, num_bytes in parts.items())


def scaling_sections(plan: Plan) -> list[str]:
    """Speed per GPU by number of GPUs, and the limits of scaling."""
    if not plan.scaling:
        return []
    rows: list[tuple[str, ...]] = []
    for count, layout in plan.scaling.items():
        if layout is None:
            rows.append((f"{count:,}", "no layout", "", "", "", ""))
            continue
        step = layout.step
        rows.append((
            f"{count:,}", *layout_cells(layout)[1:4], f"{step.limit} {step.parts[step.limit] / step.seconds:.0%}",
            layout.name,
        ))  # fmt: skip
    header = ("GPUs", "tokens/s/GPU", "MFU", "step s", "largest loss", "layout")
    lines = [
        f"speed per GPU falls below {limit.share:.0%} of the best at {limit.world_size:,} GPUs: {limit.part} grew the "
        "most"
        for limit in scaling_limits(plan.scaling)
    ] or ["speed per GPU stays above 90% of the best at every number of GPUs"]
    batches = {
        iterations.global_batch_size(layout.run.config, layout.run.world_size)
        for layout in plan.scaling.values()
        if layout
    }
    batch = "the same batch" if len(batches) <= 1 else "about the same batch"
    return [f"{batch} on more GPUs\n" + text_table(header, rows, "rrrrll"), "\n".join(lines)]


def assumptions_text(plan: Plan) -> str:
    """The hardware figures, measured fractions and defaults that the plan is based on."""
    gpu, measured = plan.gpu, CALIBRATION
    shown = [name for name in ("bf16", "fp8") if name in gpu.peak.flops]
    peaks = ", ".join(f"{name} {gpu.peak.flops[name] / 1e12:,.0f}" for name in shown)
    flag_of = {name: settings_by_name()[name].flags[0] for name in plan.assumed}
    filled = [flag_of[name] if value is True else f"{flag_of[name]} {value}" for name, value in plan.assumed.items()]
    is_blackwell = gpu.compute_capability >= (10, 0)
    block_fraction = (
        f"{measured.block_scaled_gemm_fraction} (recipes with block scales: fitted to published speeds)"
        if is_blackwell else f"{measured.blockwise_gemm_fraction} (recipes with block scales)"
    )  # fmt: skip
    lines = [
        f"{gpu.name}: dense peaks {peaks} TFLOP/s, HBM {gpu.hbm_bytes_per_s / 1e12:.2f} TB/s, {gpu.link} "
        f"{gpu.link_bytes_per_s / 1e9:.0f} GB/s and network {gpu.network_bytes_per_s / 1e9:.1f} GB/s per direction, "
        f"{gpu.gpus_per_node} GPUs per node",
        f"fractions reached: GEMMs {measured.bf16_gemm_fraction} (BF16), {measured.fp8_gemm_fraction} (FP8), "
        f"{block_fraction}; memory-bound operations {measured.memory_fraction}, casts {measured.cast_fraction}, "
        f"optimizer {measured.optimizer_fraction}; NVLink {measured.nvlink_fraction}: "
        f"{'the others ' if is_blackwell else ''}measured on H200s and assumed for all GPUs. Network "
        f"{NETWORK_FRACTION}: assumed",
        "communication does not slow down computation, all GPUs are equally fast, checkpoints and validation take no "
        "time",
        f"{FREE_MEMORY_FRACTION:.0%} of the memory stays free",
        "a checkpoint that is resumed was saved in the same layout",
    ]
    if any(layout.cuda_graph_bytes for layout in plan.search.layouts):
        lines.append(
            "a CUDA graph keeps the memory of its capture; in addition to it, the first statistics step "
            "(--fp8-log-interval) and steps of --fp8-guard allocate activations and logits of a step, and a validation "
            "(--eval-iters) logits and one layer: estimated, not measured"
        )
    if filled:
        lines.append("assumed settings that were not given: " + ", ".join(filled))
    head = "assumptions (errors against measurements: docs/planning.md)"
    return "\n".join([head, *(f"  {line}" for line in lines)])


def command_lines(layout: PlannedLayout) -> list[str]:
    """Flags for `megafp8 pretrain`, each with its values."""
    lines: list[list[str]] = []
    for word in flags.to_argv(layout.config):
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return [shlex.join(words) for words in lines]


def plan_data(plan: Plan, top: int) -> dict[str, Any]:
    """The complete plan as JSON data, in bytes and seconds."""
    return {
        "gpu": plan.gpu.name,
        "world_size": plan.search.world_size,
        "num_legal": plan.search.num_legal,
        "num_fitting": len(plan.search.layouts),
        "assumed": plan.assumed,
        "remarks": plan.warnings,
        "layouts": [layout_data(layout) for layout in plan.search.layouts[:top]],
        "scaling": {str(count): layout and layout_data(layout) for count, layout in plan.scaling.items()},
        "limits": [vars(limit) for limit in scaling_limits(plan.scaling)],
    }


def layout_data(layout: PlannedLayout) -> dict[str, Any]:
    """One layout as JSON data."""
    run, step = layout.run, layout.step
    return {
        "name": layout.name,
        "tensor": run.sizes.tensor, "pipeline": run.pipeline, "chunks": run.chunks, "context": run.context,
        "data": run.data, "micro_batch_size": run.config.training.micro_batch_size,
        "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
        "mfu_fraction": step.mfu_fraction,
        "step_s": step.seconds,
        "step_parts_s": step.parts,
        "memory_bytes": layout.memory_bytes,
        "memory_parts_bytes": memory_parts(layout),
        "sent_bytes": bytes_by_group(run),
        "argv": flags.to_argv(layout.config),
    }  # fmt: skip
