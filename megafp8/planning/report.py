"""A plan as text for people and as data for programs."""

from __future__ import annotations

import shlex
from typing import Any

from megafp8.config import flags
from megafp8.config.settings import settings_by_name
from megafp8.planning.communication import NETWORK_FRACTION
from megafp8.planning.layouts import MARGIN_FRACTION, PlannedLayout
from megafp8.planning.plan import Plan, scaling_limits
from megafp8.planning.planned_run import CALIBRATION
from megafp8.planning.step_time import bytes_by_group
from megafp8.utils.formatting import aligned

GIB = 2**30
PARTS_BELOW_FRACTION = 0.005
"""Parts of a step that are shorter are left out of the text."""


def plan_text(plan: Plan, top: int) -> str:
    """The whole plan."""
    found = plan.found
    head = (
        f"{found.world_size} x {plan.gpu.name}: {found.num_legal} legal layouts, {len(found.layouts)} fit in "
        f"{plan.gpu.memory_bytes / GIB:.1f} GiB"
    )
    if not found.layouts:
        assert found.smallest_bytes is not None
        needs = f"the smallest needs {found.smallest_bytes / GIB:.1f} GiB a GPU: more GPUs, or a smaller micro batch"
        return "\n\n".join([head, *plan.remarks, needs, *scaling_sections(plan), assumptions_text(plan)])
    best = found.layouts[0]
    sections = [
        head,
        *plan.remarks,
        aligned(
            ("", "layout", "tokens/s/GPU", "MFU", "step s", "GiB"),
            [(str(number), *layout_cells(layout)) for number, layout in enumerate(found.layouts[:top], start=1)],
            "rl",
        ),
        "memory of layout 1, GiB on its fullest GPU\n" + memory_text(best),
        "a step of layout 1\n" + step_text(best),
        "layout 1 sends, GB a GPU and step\n" + traffic_text(best),
        *scaling_sections(plan),
        assumptions_text(plan),
        "flags of layout 1\n" + command_text(best),
    ]
    return "\n\n".join(sections)


def layout_cells(layout: PlannedLayout) -> tuple[str, ...]:
    """Cells of a table's row."""
    step = layout.step
    return (
        layout.name, f"{step.tokens_per_s_per_gpu:,.0f}", f"{step.mfu_fraction:.1%}", f"{step.seconds:.3f}",
        f"{layout.memory_bytes / GIB:.1f}",
    )  # fmt: skip


def memory_text(layout: PlannedLayout) -> str:
    """Each part; the last is what torch does not allocate, before it what a graph makes other passes need."""
    return "  " + ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory_parts(layout).items())


def memory_parts(layout: PlannedLayout) -> dict[str, int]:
    """Bytes by part."""
    parts = layout.memory.parts()
    parts |= {"beside the graph": layout.beside_graph_bytes, "context and NCCL": layout.outside_bytes}
    return {name: size for name, size in parts.items() if size}


def step_text(layout: PlannedLayout) -> str:
    """Each part with its share."""
    seconds = layout.step.seconds
    parts = sorted(layout.step.parts.items(), key=lambda part: -part[1])
    shown = [f"{name} {part / seconds:.1%}" for name, part in parts if part > PARTS_BELOW_FRACTION * seconds]
    return "  " + ", ".join(shown)


def traffic_text(layout: PlannedLayout) -> str:
    """Bytes by group."""
    groups = bytes_by_group(layout.run)
    return "  " + (", ".join(f"{name} {size / 1e9:.2f}" for name, size in groups.items()) or "nothing")


def scaling_sections(plan: Plan) -> list[str]:
    """Speed a GPU over numbers of GPUs, and where it is lost."""
    if not plan.scaling:
        return []
    rows = []
    for count, layout in plan.scaling.items():
        if layout is None:
            rows.append((f"{count:,}", "no layout", "", "", "", ""))
            continue
        step = layout.step
        rows.append((
            f"{count:,}", f"{step.tokens_per_s_per_gpu:,.0f}", f"{step.mfu_fraction:.1%}", f"{step.seconds:.3f}",
            f"{step.limit} {step.parts[step.limit] / step.seconds:.0%}", layout.name,
        ))  # fmt: skip
    header = ("GPUs", "tokens/s/GPU", "MFU", "step s", "largest loss", "layout")
    lines = [
        f"below {limit.share:.0%} of the best speed a GPU at {limit.world_size:,} GPUs: {limit.part} grew the most"
        for limit in scaling_limits(plan.scaling)
    ] or ["no number of GPUs loses a tenth of the best speed"]
    batches = {layout.run.config.training.global_batch_size for layout in plan.scaling.values() if layout}
    batch = "the same batch" if len(batches) <= 1 else "about the same batch"
    return [f"{batch} on more GPUs\n" + aligned(header, rows, "rrrrll"), "\n".join(lines)]


def assumptions_text(plan: Plan) -> str:
    """What the figures rest on."""
    gpu, measured = plan.gpu, CALIBRATION
    peaks = ", ".join(f"{name} {plan.gpu.peak.flops[name] / 1e12:,.0f}" for name in ("bf16", "fp8"))
    flag_of = {name: settings_by_name()[name].flags[0] for name in plan.assumed}
    filled = [flag_of[name] if value is True else f"{flag_of[name]} {value}" for name, value in plan.assumed.items()]
    is_blackwell = gpu.compute_capability >= (10, 0)
    of_blocks = (
        f"{measured.block_scaled_gemm_fraction} (MXFP8, NVFP4, blockwise: fitted to published speeds)"
        if is_blackwell else f"{measured.blockwise_gemm_fraction} (blockwise)"
    )  # fmt: skip
    lines = [
        f"{gpu.name}: dense peaks {peaks} TFLOP/s, HBM {gpu.hbm_bytes_per_s / 1e12:.2f} TB/s, NVLink "
        f"{gpu.nvlink_bytes_per_s / 1e9:.0f} GB/s and network {gpu.network_bytes_per_s / 1e9:.1f} GB/s each way, "
        f"{gpu.gpus_per_node} GPUs a node",
        f"of that reached: GEMMs {measured.bf16_gemm_fraction} (BF16), {measured.fp8_gemm_fraction} (FP8), "
        f"{of_blocks}; passes over memory {measured.memory_fraction}, "
        f"casts {measured.cast_fraction}, optimizer {measured.optimizer_fraction}; NVLink {measured.nvlink_fraction}: "
        f"{'the others ' if is_blackwell else ''}measured on H200s, taken for every GPU. "
        f"Network {NETWORK_FRACTION}: assumed",
        "communication does not slow computation, all GPUs are equally fast, no time for saving or validation",
        f"{MARGIN_FRACTION:.0%} of the memory stays free",
    ]
    if any(layout.beside_graph_bytes for layout in plan.found.layouts):
        lines.append(
            "a CUDA graph keeps the memory of its passes; beside it a look (--fp8-log-interval) has a step's "
            "activations and logits again, a validation (--eval-iters) logits and one layer: reckoned, not measured"
        )
    if filled:
        lines.append("not given, so taken: " + ", ".join(filled))
    return "assumptions (docs/planning.md has the errors against measurements)\n" + "\n".join(
        f"  {line}" for line in lines
    )


def command_text(layout: PlannedLayout) -> str:
    """Flags for `pretrain_gpt.py`, one a line."""
    return "  " + " \\\n  ".join(command_lines(layout))


def command_lines(layout: PlannedLayout) -> list[str]:
    """Each flag with its values."""
    lines: list[list[str]] = []
    for word in flags.to_argv(layout.run.config):
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return [shlex.join(words) for words in lines]


def plan_data(plan: Plan, top: int) -> dict[str, Any]:
    """The same for programs. Units: bytes, seconds."""
    return {
        "gpu": plan.gpu.name,
        "world_size": plan.found.world_size,
        "num_legal": plan.found.num_legal,
        "num_fitting": len(plan.found.layouts),
        "assumed": plan.assumed,
        "remarks": plan.remarks,
        "layouts": [layout_data(layout) for layout in plan.found.layouts[:top]],
        "scaling": {str(count): layout and layout_data(layout) for count, layout in plan.scaling.items()},
        "limits": [vars(limit) for limit in scaling_limits(plan.scaling)],
    }


def layout_data(layout: PlannedLayout) -> dict[str, Any]:
    """One layout."""
    run, step = layout.run, layout.step
    return {
        "name": layout.name,
        "tensor": run.tensor, "pipeline": run.pipeline, "chunks": run.chunks, "context": run.context,
        "data": run.data, "micro_batch_size": run.config.training.micro_batch_size,
        "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
        "mfu_fraction": step.mfu_fraction,
        "step_s": step.seconds,
        "step_parts_s": step.parts,
        "memory_bytes": layout.memory_bytes,
        "memory_parts_bytes": memory_parts(layout),
        "sent_bytes": bytes_by_group(run),
        "argv": flags.to_argv(run.config),
    }  # fmt: skip
