"""Compiled loops: AdamW and the sum of gradients in one pass over memory.

bfloat16 arrives as bits in uint16 arrays; Numba has no float16 on CPUs. Every operation rounds
once, as IEEE 754 requires: no fastmath flag is set, not even "contract". So a loop's vectorized
body, its scalar tail and NumPy give bit-identical results. Moments in codes (`moments.py`) are
decoded to scratch, a chunk at a time, and encoded again after the step.

In Numba, the sum of two uint32 is a uint64, so each step of bit arithmetic casts back. Numba checks
an index that it cannot prove positive, which keeps LLVM from vectorizing, so indices are unsigned
(`np.uintp`), or start at zero in a slice. Flags that select a function (`by_type`) are True or
None, which have different types.

Letters: `p, m, v` master and moments, each `(segments, width)`, flattened. For split masters
(`masters.py`) `p` has the rounded numbers and `rest` the lower bits; otherwise `rest` is None.
Without codes, `m_scales` and `v_scales` are also None. `sums` are over earlier gradients and their
squares, a pair or None; `gs` are eight more gradients and `fs` their factors, None and 0 if there
are fewer. A tile is elements `left` to `right`, in whole buckets, of segments `first` to `last`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from zenflow_jax._host import arrays, moments

# Numba caches compiled loops on disk, with these numbers in them, and recompiles when this file
# changes, but not when an imported file does. So the numbers are repeated here as literals.
BUCKET, _BEND, _LEAST, _ZERO = 32, np.float32(30), np.float32(2.0**-60), np.float32(0)
_TOP_FIRST, _TOP_SECOND = np.float32(127 * 187), np.float32(255)
assert (BUCKET, _BEND, _LEAST) == (arrays.BUCKET, moments.BEND, moments.LEAST)
assert (_TOP_FIRST, _TOP_SECOND) == (moments.TOP_FIRST, moments.TOP_SECOND)
_TWICE_BEND, _BEND_SQUARED = 2 * _BEND, _BEND * _BEND
_PER_FIRST, _PER_SECOND = 1 / _TOP_FIRST, 1 / _TOP_SECOND
# Adding this to a small number leaves the nearest integer in the lower bits, ties to even.
_ROUNDER = np.float32(1.5 * 2**23)
# Elements in a chunk with leading channels: larger scratch exceeds the L1 cache, and smaller chunks
# take more calls. With trailing channels, a chunk has a bucket's rows and this many lanes: with
# fewer, the scratch (512 KiB) would fit in the L1 cache, but memory reads would be short.
_CHUNK, _LANES = 4096, 2048

# These functions are never called from C, and inner functions never from Python. Numba's wrappers
# for both took a third of the compile time. Both options of `numba.njit` are undocumented; it
# rejects unknown options.
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_INNER: Any = {**_OPTIONS, "no_cpython_wrapper": True}


def compiled(function: Callable, options: dict[str, Any] = _OPTIONS) -> Any:
    """Compiles to serial code that releases the GIL, cached on disk if Numba finds a folder."""
    function = inspect.unwrap(function)  # wrapped by jaxtyping's import hook in tests
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)


def inner(function: Callable) -> Any:
    """Compiles a function for compiled code only; a call from Python crashes the process."""
    return compiled(function, _INNER)


def by_type(position: int, kind: Any, if_kind: Callable, otherwise: Callable) -> Callable:
    """Returns a function for compiled code that is `if_kind` if an argument is a `kind`."""

    def either(*args: Any) -> Any:
        raise NotImplementedError("Only compiled code may call this function.")

    pair = inspect.unwrap(if_kind), inspect.unwrap(otherwise)
    # Not strict, because argument names may differ from `args`.
    overload(either, jit_options=_INNER, strict=False)(
        lambda *args: pair[0] if args[position] == kind else pair[1]
    )
    return either


# The bits of a bfloat16 are the upper half of a float32.
_widened = by_type(
    0,
    numba.uint16,
    lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32),
    lambda x: x,
)


def _first(sums, g, f, i):
    x = _widened(g[i]) * f
    return x, x * x


def _added(total, squares, g, f, i):
    x = _widened(g[i]) * f
    return total + x, squares + x * x


_plus = by_type(2, numba.none, lambda total, squares, g, f, i: (total, squares), _added)
_begun = by_type(
    0, numba.none, _first, lambda sums, g, f, i: _plus(sums[0][i], sums[1][i], g, f, i)
)

_earlier = by_type(0, numba.none, lambda first, *sums: sums, lambda first, *sums: None)


@inner
def _sum(sums, gs, fs, i):
    """Sums gradients and squares in order; every operation rounds, as in separate passes."""
    a, b = _begun(sums, gs[0], fs[0], i)
    a, b = _plus(a, b, gs[1], fs[1], i)
    a, b = _plus(a, b, gs[2], fs[2], i)
    a, b = _plus(a, b, gs[3], fs[3], i)
    a, b = _plus(a, b, gs[4], fs[4], i)
    a, b = _plus(a, b, gs[5], fs[5], i)
    a, b = _plus(a, b, gs[6], fs[6], i)
    return _plus(a, b, gs[7], fs[7], i)


@compiled
def accumulate(total, squares, first, gs, fs):
    sums = _earlier(first, total, squares)
    for e in range(total.size):
        i = np.uintp(e)
        # Assigning a tuple to two elements would stop vectorization.
        a, b = _sum(sums, gs, fs, i)
        total[i] = a
        squares[i] = b


def _joined(p, rest, i):
    rounded = np.uint32(np.uint32(p[i]) << np.uint32(16))
    return np.uint32(rounded + np.uint32(np.int32(rest[i]))).view(np.float32)


def _keep_whole(x, p, rest, i, on):
    p[i] = x if on else p[i]


def _keep_split(x, p, rest, i, on):
    rounded = bfloat16_bits(x)
    p[i] = _select(on, rounded, p[i])
    rest[i] = np.int16(_select(on, _remainder(x, rounded), np.uint16(rest[i])))


_master = by_type(1, numba.none, lambda p, rest, i: p[i], _joined)
_keep = by_type(2, numba.none, _keep_whole, _keep_split)


@inner
def _select(on, new, old):
    """Returns `new` if `on`, else `old`, in uint16, without branches, so that LLVM vectorizes."""
    return np.uint16(old ^ np.uint16(np.uint16(old ^ new) & np.uint16(-np.int64(on))))


@inner
def _remainder(x, rounded):
    """Returns `rest`, the lower half of a master, as uint16 (`masters.py`)."""
    bits = np.float32(x).view(np.uint32)
    lower, upper = np.uint16(bits), np.uint16(np.uint32(bits >> np.uint32(16)))
    halfway_down = (lower == np.uint16(0x8000)) & (upper == rounded)
    return np.uint16(lower - np.uint16(halfway_down))


@compiled
def bfloat16_bits(x):
    """Rounds to nearest, ties to even; a NaN becomes quiet and keeps its sign, as in ml_dtypes."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    nearest = np.uint32(bits + np.uint32(np.uint32(0x7FFF) + odd))
    nan = np.uint32(np.uint32(bits & np.uint32(0x80000000)) | np.uint32(0x7FC00000))
    return np.uint16(np.uint32(nearest if x == x else nan) >> np.uint32(16))


@inner
def _element(p, m, v, g, squares, m_debias, v_debias, scalars):
    scale, learning_rate, b1, b2, one_minus_b1, one_minus_b2, eps, weight_decay = scalars
    m = m * b1 + (g * scale) * one_minus_b1
    v = v * b2 + (squares * scale) * one_minus_b2
    direction = (m * m_debias) / (np.sqrt(v * v_debias) + eps) + p * weight_decay
    return p - direction * learning_rate, m, v


@inner
def _advance(p, rest, at, m, v, at_m, size, inputs, channel, lanes):
    """Takes the step on `size` neighbours, from element `at` of masters and `at_m` of moments.

    They are in one channel or, if `lanes` is True, in consecutive channels.
    """
    (sums, gs, fs), (active, m_debias, v_debias), scalars = inputs
    for e in range(size):
        i, j = np.uintp(at + e), np.uintp(at_m + e)
        c = np.uintp(channel) if lanes is None else np.uintp(channel + e)
        # Writes every lane, because LLVM vectorizes conditional stores only with masked stores.
        on = True if lanes is None else active[c]
        g, squares = _sum(sums, gs, fs, i)
        x = _master(p, rest, i)
        x, new_m, new_v = _element(x, m[j], v[j], g, squares, m_debias[c], v_debias[c], scalars)
        _keep(x, p, rest, i, on)
        m[j] = new_m if on else m[j]
        v[j] = new_v if on else v[j]


# The array in which a moment is updated: its values, or scratch.
_work_array = by_type(
    1, numba.none, lambda x, scales, size: x, lambda x, scales, size: np.empty(size, np.float32)
)


@compiled
def adamw_leading(p, rest, m, m_scales, v, v_scales, inputs, rows, width, tile):
    first, last, left, right = tile
    active, m_debias, v_debias = inputs[1]
    wide_m, wide_v = _work_array(m, m_scales, _CHUNK), _work_array(v, v_scales, _CHUNK)
    buckets = _buckets(width)
    most = max(_CHUNK // max(right - left, 1), 1)
    s = first
    while s < last:
        if not active[s]:
            s += 1
            continue
        # Neighbours that take the same step form a chunk, because a narrow channel costs more to
        # start than to compute.
        end = s + 1
        while (
            end < min(last, s + most)
            and active[end]
            and m_debias[end] == m_debias[s]
            and v_debias[end] == v_debias[s]
        ):
            end += 1
        for a in range(left, right, _CHUNK):
            b = min(a + _CHUNK, right)
            i, j = s * width + a, (end - 1) * width + b
            k, k_end = s * buckets + a // BUCKET, (end - 1) * buckets + _buckets(b)
            at_m = i if m_scales is None else 0
            if m_scales is not None:
                _convert(m[i:j], m_scales[k:k_end], wide_m[: j - i], b - a, None, None)
                _convert(v[i:j], v_scales[k:k_end], wide_v[: j - i], b - a, True, None)
            _advance(p, rest, i, wide_m, wide_v, at_m, j - i, inputs, s, None)
            if m_scales is not None:
                _convert(m[i:j], m_scales[k:k_end], wide_m[: j - i], b - a, None, True)
                _convert(v[i:j], v_scales[k:k_end], wide_v[: j - i], b - a, True, True)
        s = end


@compiled
def adamw_trailing(p, rest, m, m_scales, v, v_scales, inputs, rows, width, tile):
    first, last, left, right = tile
    active, m_debias, v_debias = inputs[1]
    lanes = right - left if m_scales is None else min(_LANES, right - left)
    wide_m = _work_array(m, m_scales, BUCKET * lanes)
    wide_v = _work_array(v, v_scales, BUCKET * lanes)
    entry = first // rows
    for top in range(first, last, BUCKET):
        height = min(BUCKET, last - top)
        for a in range(left, right, lanes):
            size = min(lanes, right - a)
            i, c, k = top * width + a, entry * width + a, _bucket_of(top, rows) * width + a
            shape, on = (height, size, width), active[c : c + size]
            if m_scales is not None:
                _convert_rows(m[i:], m_scales[k:], wide_m, shape, on, None, None)
                _convert_rows(v[i:], v_scales[k:], wide_v, shape, on, True, None)
            for r in range(height):
                at = i + r * width
                at_m = at if m_scales is None else r * size
                _advance(p, rest, at, wide_m, wide_v, at_m, size, inputs, c, True)
            if m_scales is not None:
                _convert_rows(m[i:], m_scales[k:], wide_m, shape, on, None, True)
                _convert_rows(v[i:], v_scales[k:], wide_v, shape, on, True, True)


# Moments in codes. `root` is True for a second moment, whose codes stand for its square root, else
# None; `encode` is True to encode and None to decode.


def _first_decoded(code, scale, root):
    c = np.float32(code)
    return ((c * (np.abs(c) + _TWICE_BEND)) * _PER_FIRST) * scale


def _second_decoded(code, scale, root):
    w = (np.float32(code) * _PER_SECOND) * scale
    return w * w


def _first_code(x, inverse, root):
    y = np.sqrt(np.abs(x) * inverse + _BEND_SQUARED) - _BEND
    return np.int8(np.float32(np.copysign(y, x) + _ROUNDER).view(np.uint32))


def _second_code(x, inverse, root):
    y = np.sqrt(x) * inverse
    return max(np.uint8(np.float32(y + _ROUNDER).view(np.uint32)), np.uint8(y > _ZERO))


_decoded = by_type(2, numba.none, _first_decoded, _second_decoded)
_code = by_type(2, numba.none, _first_code, _second_code)
# A bucket's stored scale, from its largest magnitude.
_scale = by_type(
    1,
    numba.none,
    lambda x, root: bfloat16_bits(_ZERO if x < _LEAST else x),
    lambda x, root: _ZERO if np.sqrt(x) < _LEAST else np.sqrt(x),
)


@inner
def _inverse(scale, root):
    scale = _widened(scale)
    top = _TOP_FIRST if root is None else _TOP_SECOND
    return top / scale if scale > _ZERO else _ZERO


@inner
def _magnitude(x):
    """Returns the bits of |x|, which sort like the numbers, with NaN last."""
    return np.uint32(np.float32(x).view(np.uint32) & np.uint32(0x7FFFFFFF))


@inner
def _convert(codes, scales, x, width, root, encode):
    """Converts channels of `width` elements, or a piece of one channel."""
    size = codes.size if width % BUCKET == 0 else width
    whole = size // BUCKET * BUCKET
    for s in range(codes.size // size):
        i, k = s * size, s * _buckets(size)
        for a, b, length in ((i, i + whole, BUCKET), (i + whole, i + size, size - whole)):
            if a < b:
                shape = ((b - a) // length, length)
                end = k + shape[0]
                _convert_buckets(
                    codes[a:b].reshape(shape), scales[k:end], x[a:b].reshape(shape), root, encode
                )
                k = end


def _decode_buckets(codes, scales, x, root, encode):
    for b in range(x.shape[0]):
        scale = _widened(scales[b])
        for i in range(x.shape[1]):
            x[b, i] = _decoded(codes[b, i], scale, root)


def _encode_buckets(codes, scales, x, root, encode):
    # LLVM vectorizes the search for a maximum only if its length is unknown.
    for b in range(x.shape[0]):
        largest = np.uint32(0)
        for i in range(x.shape[1]):
            bits = _magnitude(x[b, i])
            largest = bits if bits > largest else largest
        scales[b] = _scale(np.uint32(largest).view(np.float32), root)
        inverse = _inverse(scales[b], root)
        for i in range(x.shape[1]):
            codes[b, i] = _code(x[b, i], inverse, root)


def _decode_rows(codes, scales, x, shape, active, root, encode):
    height, lanes, stride = shape
    for r in range(height):
        for e in range(lanes):
            i, j = np.uintp(r * stride + e), np.uintp(r * lanes + e)
            x[j] = _decoded(codes[i], _widened(scales[np.uintp(e)]), root)


def _encode_rows(codes, scales, x, shape, active, root, encode):
    height, lanes, stride = shape
    largest = np.zeros(lanes, np.uint32)
    for r in range(height):
        for e in range(lanes):
            bits = _magnitude(x[np.uintp(r * lanes + e)])
            largest[e] = bits if bits > largest[e] else largest[e]
    inverse = np.empty(lanes, np.float32)
    for e in range(lanes):
        scale = _scale(np.uint32(largest[e]).view(np.float32), root)
        inverse[e] = _inverse(scale, root)
        scales[e] = scale if active[e] else scales[e]
    for r in range(height):
        for e in range(lanes):
            i, j = np.uintp(r * stride + e), np.uintp(r * lanes + e)
            code = _code(x[j], inverse[e], root)
            codes[i] = code if active[e] else codes[i]


# Converts buckets, one per row.
_convert_buckets = by_type(4, numba.none, _decode_buckets, _encode_buckets)
# Converts a bucket's rows of `lanes` elements, whose codes are `stride` elements apart. Inactive
# channels keep their codes and scales.
_convert_rows = by_type(6, numba.none, _decode_rows, _encode_rows)


@inner
def _buckets(size):
    return (size + BUCKET - 1) // BUCKET


@inner
def _bucket_of(row, rows):
    """Returns the number of a row's bucket, counted over all entries of `rows` rows."""
    return row // rows * _buckets(rows) + row % rows // BUCKET
