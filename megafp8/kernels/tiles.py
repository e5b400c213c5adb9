"""Square tiles inside Triton kernels that write FP8 by rows and transposed.

A program reads its tile as four parts, each of every fourth row. Codes of four tokens of a column then lie at the same
place of the four parts, and make one word: words are transposed, not bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.kernels.rounding import cast_to_code, cast_to_words, widen

SIDE = 128


def has_complete_tiles(tokens: int, width: int) -> bool:
    """Whether a matrix of this size has tiles only."""
    return tokens > 0 and width > 0 and tokens % SIDE == 0 and width % SIDE == 0


@triton.jit
def tile_from_the_end():
    """Row and column of this program's tile. The first programs have the last tiles: of a tensor that a kernel has just
    written, these are what the L2 cache still has, and they leave it the first ones, where the next kernel begins.
    """
    return tl.num_programs(1) - 1 - tl.program_id(1), tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def corner(tile_row, tile_column, width, SIDE: tl.constexpr):
    """Offset (int64) of a tile's first element in a matrix of this width."""
    return tile_row.to(tl.int64) * SIDE * width + tile_column * SIDE


@triton.jit
def part_of(tile, width, PART: tl.constexpr, SIDE: tl.constexpr):
    """Pointers to one part [SIDE / 4, SIDE] of the tile at `tile` in a matrix of this width."""
    rows = tile + (4 * tl.arange(0, SIDE // 4) + PART) * width
    return rows[:, None] + tl.arange(0, SIDE)[None, :]


@triton.jit
def load_tile(tile, width, SIDE: tl.constexpr):
    """The four parts of a tile, in FP32."""
    return (
        widen(tl.load(part_of(tile, width, 0, SIDE))),
        widen(tl.load(part_of(tile, width, 1, SIDE))),
        widen(tl.load(part_of(tile, width, 2, SIDE))),
        widen(tl.load(part_of(tile, width, 3, SIDE))),
    )


@triton.jit
def store_words(words, codes, tile_row, tile_column, num_tokens, SIDE: tl.constexpr):
    """Words [SIDE / 4, SIDE] of codes of four tokens each, to their tile of the transpose [W, T]."""
    place = tl.arange(0, SIDE)[:, None] * (num_tokens // 4) + tl.arange(0, SIDE // 4)[None, :]
    codes = (codes + corner(tile_column, tile_row, num_tokens, SIDE)).to(tl.pointer_type(tl.int32))
    tl.store(codes + place, tl.trans(words))


@triton.jit
def store_codes(
    y, scale, tile_row, tile_column, num_tokens, width, rows, columns, GRID: tl.constexpr, SIDE: tl.constexpr
):
    """A tile, given as its four parts in FP32, times one scale: codes [T, W] and their transpose [W, T]."""
    y0, y1, y2, y3 = y[0] * scale, y[1] * scale, y[2] * scale, y[3] * scale
    if rows is not None:
        rows += corner(tile_row, tile_column, width, SIDE)
        tl.store(part_of(rows, width, 0, SIDE), cast_to_code(y0, GRID))
        tl.store(part_of(rows, width, 1, SIDE), cast_to_code(y1, GRID))
        tl.store(part_of(rows, width, 2, SIDE), cast_to_code(y2, GRID))
        tl.store(part_of(rows, width, 3, SIDE), cast_to_code(y3, GRID))
    if columns is not None:
        store_words(cast_to_words(y0, y1, y2, y3, GRID), columns, tile_row, tile_column, num_tokens, SIDE)
