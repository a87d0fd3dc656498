"""Tiles of the linear kernels, and the layers for which the kernels are faster than cuBLAS. It imports no Triton.

The result does not depend on the tiles that are chosen for a weight, whatever the number of rows: all of them add the
products of an output in the same order.
"""

from __future__ import annotations

from .types import SCALES_OF_NUMBERS, LinearTiles, StoredWeight

# Most rows for which `linear` may be faster than cuBLAS, and for gate and up with their activation. In captures
# `linear_descriptors` may be faster with more, see `choose_descriptor_tiles`.
MAX_ROWS, MAX_GATED_ROWS = 64, 128
# Most rows and greatest rank for which updates of adapters are added to the products of a layer in its own kernel.
MAX_ADAPTED_ROWS, MAX_ADAPTED_RANK = 32, 64
# Rows of the smallest tile: the minimum of `tl.dot`.
FEWEST_ROWS = 16
# cuBLAS runs layers with fewer features, and layers whose rows are not aligned for loads of 16 bytes.
MIN_FEATURES, _ALIGNMENT = 256, 8
# So many tiles of 64 output features run at once on a GPU of 132 multiprocessors: a deep pipeline then pays.
_ONE_WAVE = 264
# Bytes of each row of a stored weight in a tile.
_BYTES_OF_TILE = 64
# Most input features of a tile of a stored weight; all depths divide it. Most bytes of each row of the inputs.
MOST_STORED_DEPTH, _BYTES_OF_INPUTS = 128, 256
# Most rows for which stored weights use `linear`, and `linear_stored`, if the library has a product of its own.
MAX_STORED_ROWS, MAX_WIDE_STORED_ROWS = 64, 256
# Input features of a tile of `linear_stored`.
_WIDE_DEPTH = 128
# The number of programs from which a choice of tiles is good enough.
_ENOUGH_PROGRAMS = 92
# With more than 32 rows layers of fewer outputs have tiles of their own; those of more inputs are run by cuBLAS.
_FEWEST_OUTPUTS, _MOST_INPUTS = 32 * _ENOUGH_PROGRAMS, 3072
# Tiles of `linear_descriptors` for up to so many rows that fill them, where so many programs run at once.
_WHOLE_TILES, _MOST_WHOLE_ROWS, _MOST_WHOLE_TILES = LinearTiles(64, 32, 256, 4, 4), 256, _ONE_WAVE // 2

# Depth, warps and stages by a tile's rows and output features, for 33 to 64 and for 65 to 128 rows.
_MEDIUM_TILES = {
    (64, 64): (128, 4, 5),
    (64, 128): (128, 4, 4),
    (128, 64): (128, 4, 4),
    (128, 128): (64, 8, 3),
    (128, 256): (64, 8, 4),
}
_MEDIUM_DESCRIPTOR_TILES = {
    (64, 32): (256, 4, 4),
    (64, 64): (128, 4, 6),
    (64, 128): (128, 4, 4),
    (128, 32): (128, 4, 5),
    (128, 64): (64, 4, 8),
}
# For 64 rows of gate and up: 28672 x 4096 takes 64 to 66 us with 33 to 64 rows, and 70 us with half as many warps.
_GATED_TILES = LinearTiles(64, 128, 128, 8, 4)
# Tiles for many rows, largest first.
_TILES_OF_MANY = (
    LinearTiles(256, 128, 64, 8, 3),
    LinearTiles(128, 128, 64, 8, 4),
    LinearTiles(64, 128, 64, 4, 4),
    LinearTiles(32, 64, 128, 4, 4),
)
# In an uncaptured pass of fewer rows the GPU waits for the host, and the host takes about 50 us longer to launch a
# kernel with descriptors: TTFT of Llama-3.1-8B shapes for 2,048 tokens is 72 ms with descriptors and 65 ms without.
ROWS_OF_LONG_PASSES = 4096


def _medium(rows: int, size_out: int) -> tuple[int, int]:
    """Rows and output features of a tile for 33 to 128 rows: the most features that still give enough tiles."""
    tile_rows = 64 if rows <= 64 else 128
    widths = (width for width in (256, 128, 64) if width <= 2 * tile_rows)
    return tile_rows, next((width for width in widths if -(-size_out // width) >= _ENOUGH_PROGRAMS), 32)


def _medium_tiles(rows: int, size_out: int) -> LinearTiles:
    tile_rows, features = _medium(rows, size_out)
    if features < tile_rows == 64:
        return LinearTiles(32, 64, 128, 4, 5)  # twice as many programs
    features = max(features, 64)
    return LinearTiles(tile_rows, features, *_MEDIUM_TILES[tile_rows, features])


def choose_tiles(rows: int, size_out: int, size_in: int) -> LinearTiles | None:
    """Tiles of `linear` for `rows` inputs of a layer `[size_out, size_in]` in 16-bit floating point; None if cuBLAS is
    faster.

    Measured on one H200 in bfloat16 (torch 2.11, Triton 3.6), microseconds of the kernel / of cuBLAS, at 1, 16, 32, 64
    and 128 rows, with `linear_descriptors` if `choose_descriptor_tiles` chooses it: 6144 x 4096 14.5 / 17.8, 15.3 /
    16.2, 15.6 / 17.0, 16.0 / 16.9, 18.8 / 17.3; 4096 x 4096 11.6 / 13.4, 11.7 / 13.8, 11.7 / 14.0, 11.3 / 12.5, 13.0 /
    14.1; 28672 x 4096 57.5 / 57.3, 58.5 / 62.4, 60.5 / 66.2, 60.3 / 70.3, 69.2 / 69.2; 4096 x 14336 30.7 / 32.2, 32.1 /
    33.1, 33.7 / 35.0, 33.5 / 37.7, 41.4 / 38.9; 128256 x 4096 236 / 250, 242 / 255, 248 / 270, 256 / 286, 281 / 279; at
    one row 960 x 576 3.2 / 4.0, 3072 x 576 3.6 / 4.2, 576 x 1536 4.2 / 5.2, 49152 x 576 16.3 / 16.9. Unlike cuBLAS,
    the kernels start while the kernel before still runs. With a norm after each layer, at 48 rows 960 x 576 6.0 / 7.2,
    576 x 576 5.3 / 6.7, 576 x 1536 7.7 / 8.4, 1024 x 3072 10.9 / 11.1, 2048 x 2048 9.2 / 9.5, 2048 x 8192 22.6 / 17.6,
    3072 x 2048 9.8 and by tiles of 64 rows 11.6.
    """
    is_aligned = size_in % _ALIGNMENT == 0
    if not (0 < rows <= MAX_ROWS and is_aligned and min(size_out, size_in) >= MIN_FEATURES):
        return None
    if rows > 32:
        if size_out >= _FEWEST_OUTPUTS:
            return _medium_tiles(rows, size_out)
        return LinearTiles(16, 64, 128, 4, 4) if size_in <= _MOST_INPUTS else None
    is_deep = size_in > 2 * size_out  # few tiles, each of them deep
    if is_deep and rows <= FEWEST_ROWS:
        return LinearTiles(FEWEST_ROWS, 16, 512, 2, 4) if rows <= 4 else LinearTiles(FEWEST_ROWS, 32, 256, 4, 6)
    is_one_wave = size_out <= 64 * _ONE_WAVE
    if not is_one_wave and size_in % 128:  # a depth of 64 divides narrow layers evenly
        return LinearTiles(FEWEST_ROWS if rows <= FEWEST_ROWS else 32, 128, 64, 4, 6)
    if rows > FEWEST_ROWS:
        is_half_wave = size_out < 64 * _ENOUGH_PROGRAMS
        return LinearTiles(32, 64, 128, 4, 6 if is_half_wave else 5 if is_one_wave else 4)
    return LinearTiles(FEWEST_ROWS, 64, 128, 4, 6 if is_one_wave else 4)


def choose_gated_tiles(rows: int, size_out: int, size_in: int) -> LinearTiles | None:
    """Tiles of `linear` for gate and up, `size_out` features together, with their activation; see `choose_tiles`.

    Measured on one H200 in bfloat16 with 128 rows and a norm after each layer, microseconds with these tiles / with
    128 rows and features: 3072 x 576 8.3 / 10.7, 6144 x 1024 11.8 / 14.1; 28672 x 4096 by tensor descriptors instead,
    without the norm: 68 / 62 with 33 rows, 64 / 61 with 64, 68 / 65 with 128.
    """
    if MAX_ROWS < rows <= MAX_GATED_ROWS:
        if choose_tiles(MAX_ROWS, size_out, size_in) is None:
            return None
        # In tiles wider than 128 the results and the activation need too many registers.
        enough = ((128, width) for width in (128, 64) if -(-size_out // width) >= _ENOUGH_PROGRAMS)
        sizes = next(enough, (64, 64))
        return LinearTiles(*sizes, *_MEDIUM_TILES[sizes])
    tiles = choose_tiles(rows, size_out, size_in)
    return _GATED_TILES if tiles is not None and tiles[:2] == _GATED_TILES[:2] else tiles


def choose_invariant_tiles(rows: int, size_out: int, size_in: int, itemsize: int) -> LinearTiles:
    """Tiles of `linear` for any number of rows of a layer of any size, with `itemsize` bytes an element.

    Batch-invariant calls use them, because the bits of cuBLAS' results depend on the number of rows. With more than 16
    rows they are the largest tiles that still give enough programs for a GPU.

    Measured on one H200 in bfloat16 (torch 2.11, Triton 3.6), microseconds of the kernel / of cuBLAS, for layers of
    6144 x 4096, 4096 x 4096, 28672 x 4096 and 4096 x 14336: 512 rows 54 / 39, 35 / 29, 213 / 159, 105 / 86; 2,048 rows
    167 / 137, 110 / 97, 813 / 613, 380 / 321.
    """
    if itemsize > 2:  # products in float32, of which registers hold few
        return LinearTiles(FEWEST_ROWS, 64, 32, 4, 3) if rows <= FEWEST_ROWS else LinearTiles(64, 64, 32, 4, 3)
    tiles = choose_tiles(rows, size_out, size_in)
    if tiles is not None:
        return tiles
    if rows <= FEWEST_ROWS:
        return LinearTiles(FEWEST_ROWS, 64, 128, 4, 4)
    if MAX_ROWS < rows <= 128 and size_out >= _FEWEST_OUTPUTS:
        return _medium_tiles(rows, size_out)
    for tiles in _TILES_OF_MANY:
        num_programs = -(-rows // tiles.rows) * -(-size_out // tiles.features)
        if 2 * rows > tiles.rows and num_programs >= _ENOUGH_PROGRAMS:
            return tiles
    return LinearTiles(32, 64, 128, 4, 4)


def choose_descriptor_tiles(rows: int, size_out: int, tiles: LinearTiles | None) -> LinearTiles | None:
    """Tiles of `linear_descriptors` in place of `tiles` of `linear`, or of cuBLAS; None if these are as fast.

    Measured on one H200 in bfloat16 (torch 2.11, Triton 3.6), microseconds of the kernel / of `linear` / of cuBLAS, for
    layers of 6144 x 4096, 4096 x 4096, 28672 x 4096 and 4096 x 14336: 64 rows 16.0 / 16.8, 11.3 / 12.5, 60.3 / 61.9,
    33.5 / 36; 8,192 rows 537 / 664 / 518, 372 / 473 / 386, 2,697 / 3,367 / 2,574, 1,270 / 1,617 / 1,356; 512 rows 51 /
    54 / 43, 34 / 35 / 28, 188 / 209 / 159, 91 / 105 / 85. With a norm after each layer, of this kernel / of cuBLAS: 128
    rows 960 x 576 6.3 / 7.2, 576 x 1536 7.2 / 8.5, 1024 x 3072 9.1 / 11.3, 2048 x 2048 8.4 / 9.9, 2048 x 8192 17.7 /
    21.0; 256 rows 6.6 / 7.5, 7.2 / 8.7, 9.5 / 11.1 for the first three.
    """
    if rows <= 32:
        return None
    is_whole = rows % _WHOLE_TILES.rows == 0 and rows <= _MOST_WHOLE_ROWS
    num_tiles = rows // _WHOLE_TILES.rows * -(-size_out // _WHOLE_TILES.features)
    if is_whole and num_tiles <= _MOST_WHOLE_TILES:
        return _WHOLE_TILES
    if tiles is None or (rows <= MAX_ROWS and size_out < _FEWEST_OUTPUTS):
        return None
    if rows <= 128:
        sizes = _medium(rows, size_out)
        return LinearTiles(*sizes, *_MEDIUM_DESCRIPTOR_TILES[sizes]) if sizes in _MEDIUM_DESCRIPTOR_TILES else None
    if tiles.rows < 128:
        return None
    return LinearTiles(128, 256, 64, 8, 3) if tiles.rows > 128 else LinearTiles(128, 128, 64, 8, 4)


def choose_stored_tiles(rows: int, weight: StoredWeight, itemsize: int) -> LinearTiles:
    """Tiles of `linear` for a stored weight and any number of rows, with `itemsize` bytes an input.

    Measured on one H200 in bfloat16 (torch 2.11, Triton 3.6), microseconds at one row / by the bandwidth of a copy, for
    layers of 6144 x 4096, 4096 x 4096, 28672 x 4096 with their activation and 4096 x 14336: e4m3 with a scale for each
    row 8.8 / 6.2, 6.8 / 4.1, 31.8 / 28.9, 17.4 / 14.5; in blocks of 128 x 128 9.5, 7.2, 33.1, 19.7; 4 bits in groups of
    128 8.4 / 3.1, 6.3 / 2.1, 26.9 / 14.5, 18.2 / 7.2; as many at four rows. Slower are tiles of half the depth (10.0,
    7.1, 39.7, 20.2), sums in 8 instead of 4 splits (10.5, 7.9, 42.7, 17.9), and rows of 64 bytes in shared memory,
    which have no bank conflicts (a round with EAGLE-3 5.9 instead of 3.3 ms). Fetching 2, 4 or 8 lines instead of one
    of each row into the L2 cache at the start is no faster for any format and product (4 bits 27.1 / 28.1 / 32.3 /
    31.5). With inputs in registers 4 bits take 7.1, 5.8, 24.6, 16.4 at one row but 7.4, 6.0, 26.7, 18.5 at four, and
    e4m3 8.4, 7.0, 36.2, 21.9. Of 8 bits with more than 8 rows the depth was not measured: it is that of few rows, since
    the order of a sum depends on it.
    """
    size_out, size_in = weight.shape[-2:]
    is_halves = weight.values.shape[-1] < size_in
    is_deep = weight.group % MOST_STORED_DEPTH == 0
    depth = MOST_STORED_DEPTH if is_deep else _BYTES_OF_TILE * (2 if is_halves else 1)
    if weight.codes is None or weight.scales.dtype not in SCALES_OF_NUMBERS:
        depth = min(depth, weight.group)
    depth = min(depth, _BYTES_OF_INPUTS // itemsize)
    if rows <= 8:
        if size_out > 8192 and (is_deep or is_halves):
            return LinearTiles(8, 32, depth, 4, 3)
        return LinearTiles(8, 16, depth, 4, 4 if is_deep or is_halves else 6)
    is_large = is_deep and not is_halves
    if rows <= 16 or (rows <= 32 and (is_halves or size_out < 8192)):
        return LinearTiles(16, 32, depth, 4, 3 if is_large else 4)
    return LinearTiles(32, 32 if is_halves or is_large else 64, depth, 4, 3)


def choose_wide_stored_tiles(rows: int, weight: StoredWeight) -> tuple[LinearTiles, int] | None:
    """Tiles of `linear_stored` and the number of parts of its sums; None if `linear` is faster or alone can compute it.

    Measured on one H200 in bfloat16 (torch 2.11, Triton 3.6), microseconds of this kernel / of `linear` / of cuBLAS in
    bfloat16, for layers of 6144 x 4096, 4096 x 4096, 28672 x 4096 and 4096 x 14336: e4m3 with a scale for each row, 64
    rows 19 / 23 / 16, 12 / 14 / 12, 55 / 77 / 62, 29 / 50 / 36; 128 rows 24 / 35 / 17, 17 / 22 / 14, 70 / 148 / 67,
    38 / 71 / 38; e4m3 in blocks of 128 x 128 without cuBLAS, 32 rows 14 / 18, 9 / 12, 40 / 53, 26 / 39; 128 rows 26 /
    41, 19 / 25, 82 / 165, 43 / 81. Scales of groups need twice the registers, too many for 128 features.
    """
    size_out, size_in = weight.shape
    depth = _WIDE_DEPTH if weight.zeros is None else min(_WIDE_DEPTH, weight.group)
    if not FEWEST_ROWS < rows <= MAX_WIDE_STORED_ROWS or size_in % depth:
        return None
    tile_rows = min(1 << (rows - 1).bit_length(), 128)
    is_one_wave = size_out <= 64 * _ONE_WAVE
    if weight.group < size_in or tile_rows <= 32 or (tile_rows > 64 and not is_one_wave):
        features, num_warps, most_programs = 64, 4, _ONE_WAVE
    else:
        features, num_warps, most_programs = 128, 8, _ONE_WAVE if tile_rows <= 64 else _ONE_WAVE // 2
    num_blocks = -(-size_out // features)
    num_parts = next((parts for parts in (4, 2) if num_blocks * parts <= most_programs), 1)
    return LinearTiles(tile_rows, features, depth, num_warps, 3), min(num_parts, size_in // depth)
