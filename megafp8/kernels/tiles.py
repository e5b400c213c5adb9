"""Square tiles inside Triton kernels that write FP8 codes by rows and transposed.

A program loads its tile as four quarters: quarter i holds the rows 4 n + i. The codes of four consecutive tokens of a
column then have the same index in the four quarters, so that they are packed into one 32-bit word without moving data
between threads, and the transpose moves words instead of bytes. All tiles are complete (`has_complete_tiles`), so that
loads and stores need no masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.kernels.rounding import cast_to_code, cast_to_words, widen

BLOCK_SIZE = 128


def has_complete_tiles(tokens: int, width: int) -> bool:
    """Whether a matrix is divided into complete tiles, at least one."""
    return tokens > 0 and width > 0 and tokens % BLOCK_SIZE == 0 and width % BLOCK_SIZE == 0


@triton.jit
def reversed_tile():
    """Row and column of this program's tile, in reverse order: the first programs have the last tiles.

    The last tiles of a tensor that the previous kernel wrote are still in the L2 cache. The first tiles come last and
    remain in the cache for the next kernel, which begins with them.
    """
    return tl.num_programs(1) - 1 - tl.program_id(1), tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def tile_offset(tile_row, tile_column, width, BLOCK_SIZE: tl.constexpr):
    """Offset (int64) of a tile's first element in a matrix of this width."""
    # int64: matrices may have more than 2^31 elements. Offsets within a tile fit into int32.
    return tile_row.to(tl.int64) * BLOCK_SIZE * width + tile_column * BLOCK_SIZE


@triton.jit
def quarter_pointers(tile, width, QUARTER: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Pointers to one quarter [BLOCK_SIZE / 4, BLOCK_SIZE], every fourth row, of the tile that begins at pointer
    `tile`."""
    rows = tile + (4 * tl.arange(0, BLOCK_SIZE // 4) + QUARTER) * width
    return rows[:, None] + tl.arange(0, BLOCK_SIZE)[None, :]


@triton.jit
def load_tile(tile, width, BLOCK_SIZE: tl.constexpr):
    """The four quarters of a tile, in FP32."""
    return (
        widen(tl.load(quarter_pointers(tile, width, 0, BLOCK_SIZE))),
        widen(tl.load(quarter_pointers(tile, width, 1, BLOCK_SIZE))),
        widen(tl.load(quarter_pointers(tile, width, 2, BLOCK_SIZE))),
        widen(tl.load(quarter_pointers(tile, width, 3, BLOCK_SIZE))),
    )


@triton.jit
def store_words(words, codes, tile_row, tile_column, num_tokens, BLOCK_SIZE: tl.constexpr):
    """Store words [BLOCK_SIZE / 4, BLOCK_SIZE], each with the codes of four tokens, to their tile of the transpose
    [W, T]."""
    # A row of the transpose has T codes, which are T / 4 words. Tile offsets are multiples of 4: words are aligned.
    offsets = tl.arange(0, BLOCK_SIZE)[:, None] * (num_tokens // 4) + tl.arange(0, BLOCK_SIZE // 4)[None, :]
    codes = (codes + tile_offset(tile_column, tile_row, num_tokens, BLOCK_SIZE)).to(tl.pointer_type(tl.int32))
    tl.store(codes + offsets, tl.trans(words))


@triton.jit
def store_codes(
    y, scale, tile_row, tile_column, num_tokens, width, rows, columns, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Scale and cast a tile, given as its four quarters in FP32, and store its codes [T, W] and their transpose [W, T].

    `rows` or `columns` is None where that copy is not wanted.
    """
    y0, y1, y2, y3 = y[0] * scale, y[1] * scale, y[2] * scale, y[3] * scale
    if rows is not None:
        rows += tile_offset(tile_row, tile_column, width, BLOCK_SIZE)
        tl.store(quarter_pointers(rows, width, 0, BLOCK_SIZE), cast_to_code(y0, FORMAT))
        tl.store(quarter_pointers(rows, width, 1, BLOCK_SIZE), cast_to_code(y1, FORMAT))
        tl.store(quarter_pointers(rows, width, 2, BLOCK_SIZE), cast_to_code(y2, FORMAT))
        tl.store(quarter_pointers(rows, width, 3, BLOCK_SIZE), cast_to_code(y3, FORMAT))
    if columns is not None:
        store_words(cast_to_words(y0, y1, y2, y3, FORMAT), columns, tile_row, tile_column, num_tokens, BLOCK_SIZE)
