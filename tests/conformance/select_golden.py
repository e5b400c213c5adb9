"""Carry a small part of a folder of golden vectors into the repository: `python select_golden.py FOLDER`.

Whole tensors are too large. A per-tensor scale depends on all of a tensor through its amax only, so rows (or columns)
that include the one with the amax keep their codes; for a product, a few rows of one operand times a few of the other
give a corner of the result.
"""

import argparse
from pathlib import Path

import numpy as np

TARGET = Path(__file__).parent / "golden_tensorwise.npz"
ROWS = 3


def magnitudes(raw: np.ndarray) -> np.ndarray:
    """BF16 (int16 view) or FP32 (int32 view) bits to absolute FP32 values, NaN as -1."""
    bits = raw.astype(np.int32) << 16 if raw.dtype == np.int16 else raw
    absolute = np.abs(bits.view(np.float32))
    return np.where(np.isnan(absolute), np.float32(-1), absolute)


def telling(raw: np.ndarray, axis: int = 0) -> np.ndarray:
    """Indices of ROWS rows (axis 0) or columns: the one with the amax, one with NaN if there is any, others spread."""
    values = magnitudes(raw)
    chosen = [int(np.unravel_index(values.argmax(), values.shape)[axis])]
    chosen += [int(place[axis]) for place in np.argwhere(values < 0)[:1]]
    spread = np.linspace(0, raw.shape[axis] - 1, 3 * ROWS).astype(int)
    chosen = list(dict.fromkeys([*chosen, *spread[1::2].tolist(), *spread[::2].tolist()]))
    return np.array(sorted(chosen[:ROWS]))


def select_tensors(source: np.lib.npyio.NpzFile, kept: dict) -> None:
    """Every distribution in BF16, those with special values in FP32 too, one ragged shape; all four casts of each."""
    for key in source.files:
        if not key.endswith("/x"):
            continue
        shape, distribution, dtype, _ = key.split("/")
        wanted = shape == "48x160" and (dtype == "bf16" or distribution in ("nan", "inf", "denormal", "rows"))
        if not wanted and (shape, distribution) != ("200x272", "nan"):
            continue
        base, rows = key[: -len("/x")], telling(source[key])
        kept[key] = source[key][rows]
        for codes_key in source.files:
            if codes_key.startswith(f"{base}/tensorwise-") and codes_key.endswith("/codes"):
                scale_key = codes_key.replace("/codes", "/scale_inv")
                kept[codes_key], kept[scale_key] = source[codes_key][rows], source[scale_key]


def select_linear(source: np.lib.npyio.NpzFile, kept: dict) -> None:
    """For each GEMM of the per-tensor linears: two operands cut down, and the corner of the result they give."""
    for recipe in ("tensorwise", "tensorwise-e4m3"):
        base = f"linear/{recipe}/step0"
        x, w, b, dy, y, dx, dw = (source[f"{base}/{name}"] for name in ("x", "w", "b", "dy", "y", "dx", "dw"))
        tokens, outputs = telling(x), telling(w)
        kept |= {f"{base}/fprop/x": x[tokens], f"{base}/fprop/w": w[outputs], f"{base}/fprop/b": b[outputs]}
        kept[f"{base}/fprop/y"] = y[np.ix_(tokens, outputs)]
        tokens, inputs = telling(dy), telling(w, axis=1)
        kept |= {f"{base}/dgrad/dy": dy[tokens], f"{base}/dgrad/w": w[:, inputs]}
        kept[f"{base}/dgrad/dx"] = dx[np.ix_(tokens, inputs)]
        outputs, inputs = telling(dy, axis=1), telling(x, axis=1)
        kept |= {f"{base}/wgrad/dy": dy[:, outputs], f"{base}/wgrad/x": x[:, inputs]}
        kept[f"{base}/wgrad/dw"] = dw[np.ix_(outputs, inputs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the npz files made by Transformer Engine")
    folder = parser.parse_args().folder
    kept: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as source:
            if path.stem.endswith("_tensor"):
                select_tensors(source, kept)
            elif path.stem.endswith("_linear_update"):
                select_linear(source, kept)
    np.savez_compressed(TARGET, **kept)
    print(f"{TARGET}: {len(kept)} arrays, {TARGET.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
