"""Copy a small part of a folder of golden vectors into the repository: `python select_golden.py FOLDER`.

Complete tensors are too large. A per-tensor scale depends on the tensor through its amax only, so rows (or columns)
that include the one with the amax keep their codes. Blocks along a row or a column depend on nothing else. For a
product, a few rows of one operand times a few of the other give a corner of the result.
"""

import argparse
from pathlib import Path

import numpy as np

TARGET = Path(__file__).parent / "golden.npz"
ROWS = 2
BLOCK = 128
SPECIAL = ("nan", "inf", "denormal")  # distributions that test the corners of the scale rules

UPDATES = (
    "max-len1-margin0-e4m3", "max-len4-margin1-e5m2", "max-len16-margin0-e4m3", "most_recent-len1-margin0-e5m2",
    "most_recent-len4-margin2-e4m3",
)  # fmt: skip

# Accumulators, formats, exponents far apart, zeros, scales of both rules; sums that end within a step or a promotion.
PRODUCTS = (
    "tensor-e4m3-fast-normal-48", "tensor-e4m3-split-normal-208", "tensor-e4m3-fast-wide-512",
    "tensor-e5m2-split-wide-512", "tensor-e5m2-fast-sparse-512", "block-fp32-e5m2-columns-512",
    "block-fp32-e4m3-wide-512", "block-pow2-e4m3-columns-512",
)  # fmt: skip


def magnitudes(raw: np.ndarray) -> np.ndarray:
    """BF16 (int16 view) or FP32 (int32 view) bits to absolute FP32 values, NaN as -1."""
    bits = raw.astype(np.int32) << 16 if raw.dtype == np.int16 else raw
    absolute = np.abs(bits.view(np.float32))
    return np.where(np.isnan(absolute), np.float32(-1), absolute)


def informative(raw: np.ndarray, axis: int = 0) -> np.ndarray:
    """Indices of ROWS rows (axis 0) or columns: the one with the amax, one with NaN if there is any, and others."""
    values = magnitudes(raw)
    chosen = [int(np.unravel_index(values.argmax(), values.shape)[axis])]
    chosen += [int(index[axis]) for index in np.argwhere(values < 0)[:1]]
    spread = np.linspace(0, raw.shape[axis] - 1, 3 * ROWS).astype(int)
    chosen = list(dict.fromkeys([*chosen, *spread[1::2].tolist(), *spread[::2].tolist()]))
    return np.array(sorted(chosen[:ROWS]))


def covering(raw: np.ndarray, axis: int) -> np.ndarray:
    """Indices along an axis, from its first square blocks, with the largest magnitude of each of these blocks."""
    values = magnitudes(raw if axis == 0 else raw.T)[:BLOCK]
    blocks = np.split(values, range(BLOCK, values.shape[1], BLOCK), axis=1)
    return np.unique([int(np.unravel_index(block.argmax(), block.shape)[0]) for block in blocks])


def select_tensors(source: dict, selected: dict) -> None:
    """Every distribution in BF16, those with special values in FP32 too, one ragged shape."""
    for key in [key for key in source if key.endswith("/x")]:
        shape, distribution, dtype, _ = key.split("/")
        wanted = shape == "48x160" and (dtype == "bf16" or distribution in SPECIAL)
        if not wanted and (shape, distribution) != ("200x272", "nan"):
            continue
        base, raw = key[: -len("/x")], source[key]
        rows, columns = np.union1d(informative(raw), covering(raw, axis=0)), informative(raw, axis=1)
        selected[key], selected[f"{base}/x_columns"] = raw[rows], raw[:, columns]
        select_tensor_casts(source, selected, base, rows)
        casts = ("e4m3-pow2", "e4m3-fp32", "e5m2-pow2") if distribution in SPECIAL else ("e4m3-pow2",)
        select_blocks(source, selected, [f"{base}/block1d-{cast}" for cast in casts], rows, columns)
        if shape == "48x160" and distribution in (*SPECIAL, "normal", "zeroblocks"):  # it is one block high
            select_squares(source, selected, [f"{base}/block2d-{cast}" for cast in casts], rows)


def select_tensor_casts(source: dict, selected: dict, base: str, rows: np.ndarray) -> None:
    """The codes of some rows: under all per-tensor casts where they test a corner, else under some."""
    tries_corner = base.split("/")[1] in SPECIAL
    casts = ("tensorwise-", "delayed-") if tries_corner else ("tensorwise-e4m3-fp32", "tensorwise-e5m2-fp32")
    for key in [key for key in source if key.startswith(tuple(f"{base}/{cast}" for cast in casts))]:
        selected[key] = source[key][rows] if key.endswith("/codes") else source[key]


def select_blocks(source: dict, selected: dict, casts: list[str], rows: np.ndarray, columns: np.ndarray) -> None:
    """Blocks along some rows and some columns."""
    for cast in casts:
        for name, chosen in (("row", rows), ("col", columns)):
            selected[f"{cast}/{name}_codes"] = source[f"{cast}/{name}_codes"][chosen]
            selected[f"{cast}/{name}_scale_inv"] = source[f"{cast}/{name}_scale_inv"][:, chosen]


def select_squares(source: dict, selected: dict, casts: list[str], rows: np.ndarray) -> None:
    """Some rows of squares with the squares' largest magnitudes. The second orientation is the transposed one."""
    for cast in casts:
        selected[f"{cast}/row_codes"] = source[f"{cast}/row_codes"][rows]
        selected[f"{cast}/row_scale_inv"] = source[f"{cast}/row_scale_inv"]
        selected[f"{cast}/col_scale_inv"] = source[f"{cast}/col_scale_inv"]
        selected[f"{cast}/col_codes"] = source[f"{cast}/col_codes"][:, rows]


def select_linear(source: dict, selected: dict, recipe: str, step: int = 0) -> None:
    """For the GEMMs of a linear: two reduced operands, and the corner of the result that they determine."""
    base = f"linear/{recipe}/step{step}"
    choose = covering if recipe.startswith("blockwise") else informative  # of the weight
    x, w, b, dy, y, dx, dw = (source[f"{base}/{name}"] for name in ("x", "w", "b", "dy", "y", "dx", "dw"))
    tokens, outputs = informative(x), choose(w, axis=0)
    corners = {"fprop/x": x[tokens], "fprop/w": w[outputs], "fprop/b": b[outputs]}
    corners["fprop/y"] = y[np.ix_(tokens, outputs)]
    tokens, inputs = informative(dy), choose(w, axis=1)
    corners |= {"dgrad/dy": dy[tokens], "dgrad/w": w[:, inputs], "dgrad/dx": dx[np.ix_(tokens, inputs)]}
    if step == 0:
        outputs, inputs = informative(dy, axis=1), informative(x, axis=1)
        corners |= {"wgrad/dy": dy[:, outputs], "wgrad/x": x[:, inputs], "wgrad/dw": dw[np.ix_(outputs, inputs)]}
    selected |= {f"{base}/{name}": corner for name, corner in corners.items()}


def select_products(source: dict, selected: dict) -> None:
    """Of the products that test the most, every other row of both operands, and the corner of the result."""
    for case in PRODUCTS:
        base = f"product/{case}"
        for key in [key for key in source if key.startswith(f"{base}/")]:
            array = source[key] if source[key].shape == (1,) else source[key][::2]  # one scale per tensor
            selected[key] = array[:, ::2] if key.endswith(("/sums", "/results")) else array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the npz files made by Transformer Engine")
    source: dict[str, np.ndarray] = {}
    for path in sorted(parser.parse_args().folder.glob("*.npz")):
        with np.load(path) as arrays:
            source |= dict(arrays)
    selected: dict[str, np.ndarray] = {}
    select_tensors(source, selected)
    for recipe in ("tensorwise", "tensorwise-e4m3", "blockwise", "blockwise-hybrid"):
        select_linear(source, selected, recipe)
    for step in range(3):
        select_linear(source, selected, "delayed", step)
    for update in UPDATES:
        selected |= {key: source[key] for key in source if key.startswith(f"update/{update}/")}
    select_products(source, selected)
    np.savez_compressed(TARGET, **selected)
    print(f"{TARGET}: {len(selected)} arrays, {TARGET.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
