"""Triton recurrence of linear attention and state-space layers; the reference is `recurrence_reference.recurrence`.

The columns of a state are independent. A program keeps some of them in registers from the first replayed position to
the last column, so the state is read once and written once, whatever the number of drafts. Sums are in float32 without
`tl.dot`, which would round the state to TF32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, kernel, wait_for_inputs
from .ring import find_block

# Elements of the state in the registers of a program, which is one warp.
_TILE = 2048
COLUMN_BLOCK = tl.constexpr(64)


@triton.jit
def _load_token(position, block, inputs, strides, ring, dim, value_dim, SIZES, DECAY: tl.constexpr):
    """Inputs of the recurrence at `position`, from the block or from the ring by the same loads.

    Args:
        block: the block's first column, that column's position, and the end of the block's positions.
        inputs, strides: pointers to query, key, value, decay and beta (or None) of the row and head, and strides
            between columns.
        ring: pointers to keys, updates and decays of the row and head.
        SIZES: HEADS, KEY_HEADS, DIM, VALUE_DIM and RING of `_recurrence_kernel`, and decays of a head.

    Returns:
        query, key, value (for a replayed position the update u), decay in the form DECAY, and beta; nothing is read
        from the end of the block on.
    """
    HEADS, KEY_HEADS, DIM, VALUE_DIM, RING, DECAYS = SIZES
    begin, first, end = block
    query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr = inputs
    query_stride_n, key_stride_n, value_stride_n, decay_stride_n, beta_stride_n = strides
    ring_keys_ptr, ring_updates_ptr, ring_decays_ptr = ring
    is_new = (position >= first) & (position < end)
    column = (begin + position - first).to(tl.int64)
    slot = position % RING
    # Scalar conditions are limits of ranges, because `vector & scalar` is no mask in Triton's interpreter.
    is_key = dim < tl.where(position < end, DIM, 0)
    is_new_key = dim < tl.where(is_new, DIM, 0)
    is_new_value = value_dim < tl.where(is_new, VALUE_DIM, 0)
    is_update = value_dim < tl.where(position < first, VALUE_DIM, 0)
    query = tl.load(query_ptr + column * query_stride_n + dim, mask=is_new_key, other=0.0)
    key_row = tl.where(is_new, key_ptr + column * key_stride_n, ring_keys_ptr + slot * (KEY_HEADS * DIM))
    key = tl.load(key_row + dim, mask=is_key, other=0.0)
    value = tl.load(value_ptr + column * value_stride_n + value_dim, mask=is_new_value, other=0.0)
    update = tl.load(ring_updates_ptr + slot * (HEADS * VALUE_DIM) + value_dim, mask=is_update, other=0.0)
    value = tl.where(is_new, value.to(tl.float32), update)
    decay_row = decay_ptr + column * decay_stride_n
    decay_row = tl.where(is_new, decay_row, ring_decays_ptr + slot * (HEADS * DECAYS))
    if DECAY == "head":
        decay = tl.load(decay_row, mask=position < end, other=0.0)
    elif DECAY == "key":
        decay = tl.load(decay_row + dim, mask=is_key, other=0.0)
    else:
        decay = tl.load(decay_row + value_dim, mask=is_new_value | is_update, other=0.0)
    beta = 1.0
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + column * beta_stride_n, mask=is_new, other=0.0).to(tl.float32)
    return query, key, value, decay, beta


@triton.jit
def _normalize(vector):
    return vector * tl.rsqrt(tl.sum(vector * vector, axis=0) + 1e-6)


@kernel
def _recurrence_kernel(
    inputs,
    rates_ptr,
    state_ptr,
    ring,
    base_ptr,
    certain_ptr,
    positions_ptr,
    out_ptr,
    query_strides,
    key_strides,
    value_strides,
    decay_stride_b: Unspecialised,
    decay_stride_n: Unspecialised,
    decay_stride_h: Unspecialised,
    beta_stride_b: Unspecialised,
    beta_stride_n: Unspecialised,
    beta_stride_h: Unspecialised,
    base_stride: Unspecialised,
    certain_stride: Unspecialised,
    positions_stride_b: Unspecialised,
    positions_stride_n: Unspecialised,
    num_columns: Unspecialised,
    dummy: Unspecialised,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    RING: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    DELTA: tl.constexpr,
    NORMALIZE: tl.constexpr,
    DECAY: tl.constexpr,
):
    """VALUE_BLOCK columns of the state of one head of one row; `inputs` are those of `_load_token`.

    Grid: (blocks of V, H, B). Reads the row's positions, base and certain, its columns of the state, the ring's entries
    from `base` to the block, and the live columns of the inputs. Writes its elements of `out`, of the state at position
    min(certain, last + 1), and of the ring's updates at live positions from `certain` on. The first program of a head
    writes the head's decays (with rates each program writes its own), and that of a key head's first head also the
    keys. No program writes entries that another one reads, because `last - base < R`. A row without a live column only
    writes 0 to `out`.
    """
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    dim = tl.arange(0, DIM_BLOCK)
    value_dim = tl.program_id(0) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    is_key = dim < DIM
    is_value = value_dim < VALUE_DIM

    wait_for_inputs()
    positions_ptr += batch * positions_stride_b
    begin, first, count = find_block(positions_ptr, positions_stride_n, num_columns, dummy, COLUMN_BLOCK)
    base = tl.load(base_ptr + batch * base_stride).to(tl.int32)
    certain = tl.load(certain_ptr + batch * certain_stride).to(tl.int32)
    first = tl.where(count > 0, first, base)
    end = first + count
    stop = tl.minimum(certain, end)
    first_kept = tl.maximum(certain, end - RING)

    # Pointers to the row and head.
    query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr = inputs
    query_ptr += batch * query_strides[0] + key_head * query_strides[2]
    key_ptr += batch * key_strides[0] + key_head * key_strides[2]
    value_ptr += batch * value_strides[0] + head * value_strides[2]
    decay_ptr += batch * decay_stride_b + head * decay_stride_h
    if beta_ptr is not None:
        beta_ptr += batch * beta_stride_b + head * beta_stride_h
    ring_keys_ptr = ring.keys + batch * (RING * KEY_HEADS * DIM) + key_head * DIM
    ring_updates_ptr = ring.updates + batch * (RING * HEADS * VALUE_DIM) + head * VALUE_DIM
    DECAYS: tl.constexpr = 1 if DECAY == "head" else DIM if DECAY == "key" else VALUE_DIM  # of a head
    ring_decays_ptr = ring.decays + batch * (RING * HEADS * DECAYS) + head * DECAYS
    out_ptr += (batch * num_columns * HEADS + head) * VALUE_DIM

    tile = dim[:, None] * VALUE_DIM + value_dim[None, :]
    is_tile = is_key[:, None] & (value_dim < tl.where(count > 0, VALUE_DIM, 0))[None, :]
    state_at = state_ptr + (batch * HEADS + head) * (DIM * VALUE_DIM) + tile
    state = tl.load(state_at, mask=is_tile, other=0.0)
    if DECAY == "rates":
        rates = tl.load(rates_ptr + head * (DIM * VALUE_DIM) + tile, mask=is_tile, other=0.0)

    for start in range(0, num_columns, COLUMN_BLOCK):
        column = start + tl.arange(0, COLUMN_BLOCK)
        is_padding = ((column < begin) | (column >= begin + count)) & (column < num_columns)
        tl.store(
            out_ptr + column.to(tl.int64)[:, None] * (HEADS * VALUE_DIM) + value_dim[None, :],
            tl.zeros([COLUMN_BLOCK, VALUE_BLOCK], out_ptr.dtype.element_ty),
            mask=is_padding[:, None] & is_value[None, :],
        )

    block, inputs = (begin, first, end), (query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr)
    strides = query_strides[1], key_strides[1], value_strides[1], decay_stride_n, beta_stride_n
    own_ring = ring_keys_ptr, ring_updates_ptr, ring_decays_ptr
    SIZES: tl.constexpr = (HEADS, KEY_HEADS, DIM, VALUE_DIM, RING, DECAYS)
    query, key, value, decay, beta = _load_token(base, block, inputs, strides, own_ring, dim, value_dim, SIZES, DECAY)
    for position in range(base, end):
        # Load the next token while this one is computed.
        next_query, next_key, next_value, next_decay, next_beta = _load_token(
            position + 1, block, inputs, strides, own_ring, dim, value_dim, SIZES, DECAY
        )
        unit_key = key.to(tl.float32)
        if NORMALIZE:
            unit_key = _normalize(unit_key)
        if DECAY == "head":
            state = state * tl.exp(decay)
        elif DECAY == "key":
            state = state * tl.exp(decay)[:, None]
        else:
            state = state * tl.exp(decay[None, :] * rates)
        update = value
        if position >= first:
            if DELTA:
                update = update - tl.sum(state * unit_key[:, None], axis=0)
            if beta_ptr is not None:
                update = update * beta
        # With `fma` a replayed token has the same rounding as in its own block.
        state = tl.fma(unit_key[:, None], update[None, :], state)
        if position + 1 == stop:
            tl.store(state_at, state, mask=is_tile)
        if position >= first:
            unit_query = query.to(tl.float32)
            if NORMALIZE:
                unit_query = _normalize(unit_query)
            out = tl.sum(state * (unit_query * scale)[:, None], axis=0)
            row = (begin + position - first).to(tl.int64) * (HEADS * VALUE_DIM)
            tl.store(out_ptr + row + value_dim, out.to(out_ptr.dtype.element_ty), mask=is_value)
            if position >= first_kept:
                slot = position % RING
                tl.store(ring_updates_ptr + slot * (HEADS * VALUE_DIM) + value_dim, update, mask=is_value)
                decays = ring_decays_ptr + slot * (HEADS * DECAYS)
                if DECAY == "rates":
                    tl.store(decays + value_dim, decay, mask=is_value)
                if tl.program_id(0) == 0:
                    if DECAY == "head":
                        tl.store(decays, decay)
                    elif DECAY == "key":
                        tl.store(decays + dim, decay, mask=is_key)
                    if head % (HEADS // KEY_HEADS) == 0:
                        tl.store(ring_keys_ptr + slot * (KEY_HEADS * DIM) + dim, key, mask=is_key)
        query, key, value, decay, beta = next_query, next_key, next_value, next_decay, next_beta


def choose_value_block(dim: int, value_dim: int) -> int:
    """Number of columns of a head's state `[dim, value_dim]` in a program."""
    return min(triton.next_power_of_2(value_dim), max(8, min(64, _TILE // triton.next_power_of_2(dim))))


def recurrence(
    query, key, value, decay, beta, state, ring, base, certain, positions, dummy, delta, normalize, scale, rates=None
):
    """See `recurrence_reference.recurrence`; computes in float32. One launch, which depends only on shapes and strides.

    A replay gives, bit for bit, the state of the block in which its tokens were new.
    """
    batch, num_columns, heads, value_dim = value.shape
    key_heads, dim = key.shape[2:]
    ring_size = ring.keys.shape[1]
    assert query.shape == key.shape == (batch, num_columns, key_heads, dim) and heads % key_heads == 0
    assert state.shape == (batch, heads, dim, value_dim) and ring.keys.dtype == key.dtype
    assert ring.keys.shape == (batch, ring_size, key_heads, dim)
    assert ring.updates.shape == (batch, ring_size, heads, value_dim)
    assert ring.decays.shape == (batch, ring_size, *decay.shape[2:]) and ring_size & (ring_size - 1) == 0
    assert all(part.dtype == torch.float32 for part in (state, decay, *ring[1:])), "states must be float32"
    assert all(part.is_contiguous() for part in (state, *ring)), "states must be contiguous"
    query, key, value = (part if part.stride(3) == 1 else part.contiguous() for part in (query, key, value))
    if decay.dim() == 4 and decay.stride(3) != 1:
        decay = decay.contiguous()
    if rates is not None:
        assert rates.shape == state.shape[1:] and rates.dtype == torch.float32 and rates.is_contiguous()
    form = "rates" if rates is not None else "head" if decay.dim() == 3 else "key"
    assert decay.shape[2:] == {"head": (heads,), "key": (heads, dim), "rates": (heads, value_dim)}[form]
    out = value.new_empty(value.shape)
    value_block = choose_value_block(dim, value_dim)
    _recurrence_kernel[(triton.cdiv(value_dim, value_block), heads, batch)](
        (query, key, value, decay, beta),
        rates,
        state,
        ring,
        base,
        certain,
        positions,
        out,
        query.stride()[:3],
        key.stride()[:3],
        value.stride()[:3],
        *decay.stride()[:3],
        *((0, 0, 0) if beta is None else beta.stride()),
        *base.stride(),
        *certain.stride(),
        *positions.stride(),
        num_columns,
        dummy,
        scale,
        HEADS=heads,
        KEY_HEADS=key_heads,
        DIM=dim,
        VALUE_DIM=value_dim,
        RING=ring_size,
        DIM_BLOCK=triton.next_power_of_2(dim),
        VALUE_BLOCK=value_block,
        DELTA=delta,
        NORMALIZE=normalize,
        DECAY=form,
        num_warps=1,
    )
    return out
