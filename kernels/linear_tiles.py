"""Sizes of the tiles of `kernels.linear`, and for which layers it is faster than cuBLAS; no Triton is needed here."""

from __future__ import annotations

from .types import LinearTiles

# Rows up to which the kernel may be faster.
MAX_ROWS = 32
# Rows of the smallest tile: the fewest that `tl.dot` takes.
FEWEST_ROWS = 16
# Narrower layers, and those whose rows are not aligned for loads of 16 bytes, are left to the library.
_MIN_FEATURES, _ALIGNMENT = 256, 8
# Up to so many tiles of 64 output features all run at once on a GPU of 132 multiprocessors: a deep pipeline pays.
_ONE_WAVE = 264

# Tiles for many rows, the largest first, and how many programs are enough to choose them.
_TILES_OF_MANY = (
    LinearTiles(256, 128, 64, 8, 3),
    LinearTiles(128, 128, 64, 8, 4),
    LinearTiles(64, 128, 64, 4, 4),
    LinearTiles(32, 64, 128, 4, 4),
)
_ENOUGH_PROGRAMS = 92
# Rows of tiles from which on `linear_many_rows` is faster than `linear`.
MANY_ROWS = 128
# Rows of passes that are not captured and so short that the GPU waits for the host, which takes about 50 us longer to
# launch a kernel with descriptors: first token of Llama-3.1-8B shapes after 2,048 tokens 72 ms with them, 65 without.
ROWS_OF_SHORT_PASSES = range(1025, 4096)


def choose_tiles(rows: int, size_out: int, size_in: int) -> LinearTiles | None:
    """Tiles for `rows` inputs of a layer `[size_out, size_in]` in 16-bit floating point; None where cuBLAS is faster.

    Measured on one H200 in bfloat16 (torch 2.11, Triton 3.6), microseconds of the kernel / of cuBLAS, at 1, 16 and 32
    rows: 6144 x 4096 14.5 / 17.8, 15.3 / 16.2, 15.6 / 16.2; 4096 x 4096 11.6 / 13.4, 11.7 / 13.8, 12.7 / 14.1;
    28672 x 4096 57.5 / 57.3, 58.5 / 62.4; 4096 x 14336 30.7 / 32.2, 32.1 / 33.1, 35.4 / 33.8; 128256 x 4096 236 / 250,
    242 / 255; at one row 960 x 576 3.2 / 4.0, 3072 x 576 3.6 / 4.2, 576 x 1536 4.2 / 5.2, 49152 x 576 16.3 / 16.9. At
    64 rows cuBLAS is faster by a fifth for the narrow ones. The result does not depend on the tiles: all of them add
    products in the same order.
    """
    is_aligned = size_in % _ALIGNMENT == 0
    if not (0 < rows <= MAX_ROWS and is_aligned and min(size_out, size_in) >= _MIN_FEATURES):
        return None
    if size_in > 2 * size_out:  # few tiles, each of them deep
        if rows > FEWEST_ROWS:
            return None
        return LinearTiles(FEWEST_ROWS, 16, 512, 2, 4) if rows <= 4 else LinearTiles(FEWEST_ROWS, 32, 256, 4, 6)
    is_one_wave = size_out <= 64 * _ONE_WAVE
    if not is_one_wave and size_in % 128:  # an even division of narrow layers
        return LinearTiles(FEWEST_ROWS if rows <= FEWEST_ROWS else MAX_ROWS, 128, 64, 4, 6)
    if rows > FEWEST_ROWS:
        return LinearTiles(MAX_ROWS, 64, 128, 4, 5) if is_one_wave else LinearTiles(MAX_ROWS, 128, 128, 8, 4)
    return LinearTiles(FEWEST_ROWS, 64, 128, 4, 6 if is_one_wave else 4)


def choose_invariant_tiles(rows: int, size_out: int, size_in: int, itemsize: int) -> LinearTiles:
    """Tiles for any number of rows, of a layer of any size and of `itemsize` bytes an element.

    Where cuBLAS is not to be asked, since the bits of its results depend on the number of rows: of more rows than 16
    the largest tiles of which there are enough for a GPU.

    Measured on one H200 in bfloat16 (torch 2.11, Triton 3.6), microseconds of the kernel / of cuBLAS, for layers of
    6144 x 4096, 4096 x 4096, 28672 x 4096 and 4096 x 14336: 64 rows 26 / 23, 22 / 19, 72 / 71, 52 / 46; 128 rows 36 /
    24, 23 / 19, 81 / 76, 56 / 46; 512 rows 54 / 39, 35 / 29, 213 / 159, 105 / 86; 2,048 rows 167 / 137, 110 / 97, 813 /
    613, 380 / 321.
    """
    if itemsize > 2:  # products by multiplications in float32, of which registers hold few
        return LinearTiles(FEWEST_ROWS, 64, 32, 4, 3) if rows <= FEWEST_ROWS else LinearTiles(64, 64, 32, 4, 3)
    tiles = choose_tiles(rows, size_out, size_in)
    if tiles is not None:
        return tiles
    if rows <= FEWEST_ROWS:
        return LinearTiles(FEWEST_ROWS, 64, 128, 4, 4)
    for tiles in _TILES_OF_MANY:
        programs = -(-rows // tiles.rows) * -(-size_out // tiles.features)
        if 2 * rows > tiles.rows and programs >= _ENOUGH_PROGRAMS:
            return tiles
    return LinearTiles(MAX_ROWS, 64, 128, 4, 4)


def choose_many_row_tiles(tiles: LinearTiles) -> LinearTiles:
    """Tiles of `linear_many_rows` in the place of `tiles` of `linear`, of at least `MANY_ROWS` rows.

    Measured on one H200 in bfloat16 (torch 2.11, Triton 3.6), microseconds of the kernel / of `linear` / of cuBLAS, for
    layers of 6144 x 4096, 4096 x 4096, 28672 x 4096 and 4096 x 14336: 8,192 rows 537 / 664 / 518, 372 / 473 / 386,
    2,697 / 3,367 / 2,574, 1,270 / 1,617 / 1,356; 512 rows 51 / 54 / 43, 34 / 35 / 28, 188 / 209 / 159, 91 / 105 / 85.
    """
    return LinearTiles(128, 256, 64, 8, 3) if tiles.rows > MANY_ROWS else LinearTiles(128, 128, 64, 8, 4)
