"""Low-rank updates (LoRA) of a tile of the outputs of linear layers, from narrow products; see `low_rank`.

A tile has some output features of some rows, `[F, ROWS]`. The adapters of a layer are added in groups: a product over
the ranks of a group's adapters, `[F, K] [K, ROWS]`, where the narrow products of adapters that a row does not have are
0. So the bits of a row's update depend neither on the tile nor on other rows' adapters. Where results have 16 bits, a
factor is the sum of two of 16 bits.

KIND is a `constexpr` tuple of what is known of the adapters of L layers: the number of adapters, RANK (a power of two,
at least the greatest rank), the first output features of all layers but the first, the number of parts of the narrow
products, the dtype of the weights, whether all ranks are RANK, what the addresses of the weights are multiples of, and
the number of adapters of a group (a power of two; K is that times RANK).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers of `places` for each layer and adapter.
PLACE = tl.constexpr(3)
# Output features from which a tile's products are those of warp groups.
_WARP_GROUP = tl.constexpr(64)


@triton.jit
def _layer_of(feature, STARTS: tl.constexpr):
    """The layer that has the output `feature`."""
    layer = feature * 0
    for number in tl.static_range(len(STARTS)):
        layer += (feature >= STARTS[number]).to(tl.int32)
    return layer


@triton.jit
def _start_of(layer, STARTS: tl.constexpr):
    start = layer * 0
    for number in tl.static_range(len(STARTS)):
        start = tl.where(layer > number, STARTS[number], start)
    return start


@triton.jit
def _has_it(bits, adapter):
    """Whether each row has each adapter, `[adapters, ROWS]`; bits beyond the last adapter are 0."""
    return ((bits[None, :] >> adapter[:, None]) & 1) > 0


@triton.jit
def _find_up(places_ptr, layer, adapter, is_other, IS_GATED: tl.constexpr, KIND: tl.constexpr):
    """Addresses and ranks of each `up` of a group of adapters, `[1, adapters]`, or by feature `[F, adapters]`."""
    ADAPTERS: tl.constexpr = KIND[0]
    place_ptr = (places_ptr + (layer * ADAPTERS + tl.minimum(adapter, ADAPTERS - 1)) * PLACE)[None, :]
    if IS_GATED:
        place_ptr += (is_other.to(tl.int32) * (ADAPTERS * PLACE))[:, None]
    return tl.load(place_ptr + 1), tl.load(place_ptr + 2)


@triton.jit
def _load_up(found, adapter, bits, features, KIND: tl.constexpr):
    """`up` `[F, K]` of the features that the layer has, of a group's adapters that some row has; 0 of others."""
    RANK: tl.constexpr = KIND[1]
    DTYPE: tl.constexpr = KIND[4]
    IS_WHOLE: tl.constexpr = KIND[5]
    ALIGNMENT: tl.constexpr = KIND[6]
    address, rank = found
    feature, _, is_own = features
    r = tl.arange(0, RANK)[None, None, :]
    mask = is_own[:, None] & (tl.max(_has_it(bits, adapter).to(tl.int32), 1) > 0)[None, :]
    mask = mask[:, :, None]
    up = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), [ALIGNMENT, ALIGNMENT])[:, :, None]
    if IS_WHOLE:
        up += (feature * RANK)[:, None, None] + r
    else:
        up += feature[:, None, None] * rank[:, :, None] + r
        mask = mask & (r < rank[:, :, None])
    loaded = tl.load(up, mask=mask, other=0.0)
    return tl.reshape(loaded, [loaded.shape[0], loaded.shape[1] * RANK])


@triton.jit
def _load_narrow(narrow, row, layer, adapter, bits, KIND: tl.constexpr):
    """The narrow products `[K, ROWS]` of a group's adapters, their parts added in order, times the scales; 0 where a
    row does not have the adapter."""
    ADAPTERS: tl.constexpr = KIND[0]
    RANK: tl.constexpr = KIND[1]
    PARTS: tl.constexpr = KIND[3]
    narrow_ptr, num_rows, count, scales_ptr = narrow
    has_it = _has_it(bits, adapter)
    entry = layer * ADAPTERS + tl.minimum(adapter, ADAPTERS - 1)
    at = (row[None, :] + (entry * num_rows)[:, None]) * RANK
    at = narrow_ptr + at[:, None, :] + tl.arange(0, RANK)[None, :, None]
    total = tl.zeros([adapter.shape[0], RANK, row.shape[0]], tl.float32)
    for part in tl.static_range(PARTS):
        more = at + part * count * num_rows * RANK
        total += tl.load(more, mask=has_it[:, None, :], other=0.0, cache_modifier=".cg")
    total *= tl.load(scales_ptr + entry)[:, None, None]
    # The compiler would change the layout of each part, with a barrier for each; it does not do so before a reduction.
    # The sum also keeps the scale out of what follows, where the compiler would not round after it.
    total = tl.sum(tl.join(total, tl.zeros_like(total)), 3)
    return tl.reshape(total, [adapter.shape[0] * RANK, row.shape[0]])


@triton.jit
def _multiply(up, narrow, update, IS_WIDE: tl.constexpr):
    """`up @ narrow + update`, with IS_WIDE with the precision of float32, else of 16 bits."""
    if IS_WIDE:
        return tl.dot(up, narrow, update, input_precision="tf32x3")
    up_high = up.to(tl.bfloat16)
    narrow_high = narrow.to(tl.bfloat16)
    update = tl.dot((up - up_high.to(tl.float32)).to(tl.bfloat16), narrow_high, update)
    update = tl.dot(up_high, (narrow - narrow_high.to(tl.float32)).to(tl.bfloat16), update)
    return tl.dot(up_high, narrow_high, update)


@triton.jit
def _add(update, up, narrow, has_it, features, IS_GATED: tl.constexpr, IS_WIDE: tl.constexpr):
    """`update` plus a product, for the rows that have it; `narrow` is that of each half."""
    _, is_other, is_own = features
    new = _multiply(up, narrow[0], update, IS_WIDE)
    if IS_GATED:
        new = tl.where(is_other[:, None], _multiply(up, narrow[1], update, IS_WIDE), new)
    return tl.where(has_it[None, :] & is_own[:, None], new, update)


@triton.jit
def _add_group(
    update,
    up,
    narrow,
    row,
    bits,
    layer,
    first,
    features,
    IS_GATED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    KIND: tl.constexpr,
):
    """`update` plus the updates of the group of adapters from `first` on."""
    RANK: tl.constexpr = KIND[1]
    DTYPE: tl.constexpr = KIND[4]
    GROUP: tl.constexpr = KIND[7]
    adapter = first + tl.arange(0, GROUP)
    products = _load_narrow(narrow, row, layer, adapter, bits, KIND)
    others = products
    if IS_GATED:
        others = _load_narrow(narrow, row, layer + 1, adapter, bits, KIND)
    up = up.to(tl.float32)
    if IS_WIDE and DTYPE.primitive_bitwidth < 32 and up.shape[0] < _WARP_GROUP:
        # The reduction keeps the order of the ranks. The compiler would change it in these tiles, and not in others.
        up = tl.sum(up[:, :, None], 2)
    has_any = tl.max(_has_it(bits, adapter).to(tl.int32), 0) > 0
    if GROUP == 1:
        update = _add(update, up, (products, others), has_any, features, IS_GATED, IS_WIDE)
    else:
        if tl.max(tl.max((up - up != 0).to(tl.int32), 1), 0) == 0:
            update = _add(update, up, (products, others), has_any, features, IS_GATED, IS_WIDE)
        else:
            # 0 times what is not finite is not 0.
            number_of = tl.arange(0, GROUP * RANK) // RANK
            for number in range(GROUP):
                own = tl.where((number_of == number)[None, :], up, 0.0)
                has_it = ((bits >> (first + number)) & 1) > 0
                update = _add(update, own, (products, others), has_it, features, IS_GATED, IS_WIDE)
    return update


@triton.jit
def _features_of(layer, feature, is_other, STARTS: tl.constexpr):
    """Features within the layer, whether they are of the second half, and whether they are the layer's."""
    return feature - _start_of(layer, STARTS), is_other, _layer_of(feature, STARTS) == layer


@triton.jit
def find_first_up(places_ptr, first, is_other, IS_GATED: tl.constexpr, KIND: tl.constexpr):
    """Where `load_first_up` reads."""
    STARTS: tl.constexpr = KIND[2]
    GROUP: tl.constexpr = KIND[7]
    return _find_up(places_ptr, _layer_of(first, STARTS), tl.arange(0, GROUP), is_other, IS_GATED, KIND)


@triton.jit
def load_first_up(found, bits, first, feature, is_other, KIND: tl.constexpr):
    """`up` of a tile's first layer and group of adapters. It does not need the narrow products."""
    STARTS: tl.constexpr = KIND[2]
    GROUP: tl.constexpr = KIND[7]
    features = _features_of(_layer_of(first, STARTS), feature, is_other, STARTS)
    return _load_up(found, tl.arange(0, GROUP), bits, features, KIND)


@triton.jit
def updated(
    result,
    up,
    places_ptr,
    narrow,
    row,
    bits,
    first,
    last,
    feature,
    is_other,
    IS_GATED: tl.constexpr,
    KIND: tl.constexpr,
):
    """`result` `[F, ROWS]` plus the updates of the rows' adapters; rows without adapters keep their bits.

    Args:
        up: from `load_first_up`.
        narrow: its pointer, the number of rows, and of layers times adapters, and the pointer of their scales.
        row, bits: `[ROWS]` the number of each row, and its adapters; 0 for none.
        first, last: the first and the last of the features.
        feature: `[F]` output features; with IS_GATED, those within each half.
        is_other: `[F]` with IS_GATED, whether a feature is of the second half.
    """
    ADAPTERS: tl.constexpr = KIND[0]
    STARTS: tl.constexpr = KIND[2]
    GROUP: tl.constexpr = KIND[7]
    if tl.max((bits != 0).to(tl.int32), 0) > 0:
        update = tl.zeros([result.shape[0], result.shape[1]], tl.float32)
        first_layer = _layer_of(first, STARTS)
        IS_WIDE: tl.constexpr = result.dtype.primitive_bitwidth == 32
        for layer in range(first_layer, _layer_of(last, STARTS) + 1):
            features = _features_of(layer, feature, is_other, STARTS)
            for group in range(0, ADAPTERS, GROUP):
                adapter = group + tl.arange(0, GROUP)
                if tl.max(tl.max(_has_it(bits, adapter).to(tl.int32), 1), 0) > 0:
                    if (layer > first_layer) | (group > 0):
                        found = _find_up(places_ptr, layer, adapter, is_other, IS_GATED, KIND)
                        up = _load_up(found, adapter, bits, features, KIND)
                    update = _add_group(update, up, narrow, row, bits, layer, group, features, IS_GATED, IS_WIDE, KIND)
        new = (result.to(tl.float32) + update).to(result.dtype)
        result = tl.where((bits != 0)[None, :], new, result)
    return result
