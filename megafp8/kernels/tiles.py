"""Square tiles inside Triton kernels that write FP8 codes by rows and transposed.

A program loads its tile as four parts: part i holds the rows 4 n + i. The codes of four consecutive tokens of a column
then have the same index in the four parts, so that they are packed into one 32-bit word without moving data between
threads, and the transpose moves words instead of bytes. All tiles are complete (`has_complete_tiles`), so that loads
and stores need no masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.kernels.rounding import cast_to_code, cast_to_words, widen

SIDE = 128


def has_complete_tiles(tokens: int, width: int) -> bool:
    """Whether a matrix is divided into complete tiles, at least one."""
    return tokens > 0 and width > 0 and tokens % SIDE == 0 and width % SIDE == 0


@triton.jit
def reversed_tile():
    """Row and column of this program's tile, in reverse order: the first programs have the last tiles.

    The last tiles of a tensor that the previous kernel wrote are still in the L2 cache. The first tiles come last and
    remain in the cache for the next kernel, which begins with them.
    """
    return tl.num_programs(1) - 1 - tl.program_id(1), tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def tile_offset(tile_row, tile_column, width, SIDE: tl.constexpr):
    """Offset (int64) of a tile's first element in a matrix of this width."""
    # int64: matrices may have more than 2^31 elements. Offsets within a tile fit into int32.
    return tile_row.to(tl.int64) * SIDE * width + tile_column * SIDE


@triton.jit
def part_pointers(tile, width, PART: tl.constexpr, SIDE: tl.constexpr):
    """Pointers to one part [SIDE / 4, SIDE], every fourth row, of the tile that begins at pointer `tile`."""
    rows = tile + (4 * tl.arange(0, SIDE // 4) + PART) * width
    return rows[:, None] + tl.arange(0, SIDE)[None, :]


@triton.jit
def load_tile(tile, width, SIDE: tl.constexpr):
    """The four parts of a tile, in FP32."""
    return (
        widen(tl.load(part_pointers(tile, width, 0, SIDE))),
        widen(tl.load(part_pointers(tile, width, 1, SIDE))),
        widen(tl.load(part_pointers(tile, width, 2, SIDE))),
        widen(tl.load(part_pointers(tile, width, 3, SIDE))),
    )


@triton.jit
def store_words(words, codes, tile_row, tile_column, num_tokens, SIDE: tl.constexpr):
    """Store words [SIDE / 4, SIDE], each with the codes of four tokens, to their tile of the transpose [W, T]."""
    # A row of the transpose has T codes, which are T / 4 words. Tile offsets are multiples of 4: words are aligned.
    place = tl.arange(0, SIDE)[:, None] * (num_tokens // 4) + tl.arange(0, SIDE // 4)[None, :]
    codes = (codes + tile_offset(tile_column, tile_row, num_tokens, SIDE)).to(tl.pointer_type(tl.int32))
    tl.store(codes + place, tl.trans(words))


@triton.jit
def store_codes(
    y, scale, tile_row, tile_column, num_tokens, width, rows, columns, GRID: tl.constexpr, SIDE: tl.constexpr
):
    """Scale and cast a tile, given as its four parts in FP32, and store its codes [T, W] and their transpose [W, T].

    `rows` or `columns` is None where that copy is not wanted.
    """
    y0, y1, y2, y3 = y[0] * scale, y[1] * scale, y[2] * scale, y[3] * scale
    if rows is not None:
        rows += tile_offset(tile_row, tile_column, width, SIDE)
        tl.store(part_pointers(rows, width, 0, SIDE), cast_to_code(y0, GRID))
        tl.store(part_pointers(rows, width, 1, SIDE), cast_to_code(y1, GRID))
        tl.store(part_pointers(rows, width, 2, SIDE), cast_to_code(y2, GRID))
        tl.store(part_pointers(rows, width, 3, SIDE), cast_to_code(y3, GRID))
    if columns is not None:
        store_words(cast_to_words(y0, y1, y2, y3, GRID), columns, tile_row, tile_column, num_tokens, SIDE)
