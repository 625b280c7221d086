"""Compiled loops: AdamW and the sum of gradients in one pass over memory; all formats of numbers.

bfloat16 arrives as bits in uint16 arrays. Every operation rounds once, as IEEE 754 requires: no
fastmath flag is set, not even "contract". So a loop's vectorized body, its scalar tail and NumPy
give bit-identical results, wherever a tile ends. Moments in codes are decoded to scratch, a chunk
at a time, and encoded again after the step.

In Numba, the sum of two uint32 is a uint64, so each step of bit arithmetic casts back. Numba checks
an index that it cannot prove positive, which keeps LLVM from vectorizing, so indices are unsigned
(`np.uintp`), or start at zero in a slice. Flags that select a function (`by_type`) are True or
None, which have different types.

Letters: `p, m, v` master and moments, each `(channels, width)`, flattened. For split masters `p`
has the rounded numbers and `rest` the lower bits; otherwise `rest` is None. Without codes,
`m_scales` and `v_scales` are also None. (`arrays.py` and `codes.py` describe these formats.)
`sums` are over earlier gradients and their squares, a pair or None; `gs` are eight more gradients
and `fs` their factors, None and 0 if there are fewer. A tile is elements `left` to `right`, in
whole buckets, of channels `first` to `last`.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from zenflow_jax._host import codes as formats

# Numba caches compiled loops on disk, with these numbers in them, and recompiles when this file
# changes, but not when an imported file does. So the numbers are repeated here as literals.
BUCKET, _BEND, _LEAST, _ZERO = 32, np.float32(30), np.float32(2.0**-60), np.float32(0)
_TOP_FIRST, _TOP_SECOND = np.float32(127 * 187), np.float32(255)
assert (BUCKET, _BEND, _LEAST) == (formats.BUCKET, formats.BEND, formats.LEAST)
assert (_TOP_FIRST, _TOP_SECOND) == (formats.TOP_FIRST, formats.TOP_SECOND)
_TWICE_BEND, _BEND_SQUARED = 2 * _BEND, _BEND * _BEND
_PER_FIRST, _PER_SECOND = 1 / _TOP_FIRST, 1 / _TOP_SECOND
# Adding this to a small number leaves the nearest integer in the lower bits, ties to even.
_ROUNDER = np.float32(1.5 * 2**23)
# Elements in a chunk: larger scratch exceeds the L1 cache, and smaller chunks take more calls.
_CHUNK = 4096

# These functions are never called from C, and inner functions never from Python. Numba's wrappers
# for both took a third of the compile time. Both options of `numba.njit` are undocumented; it
# rejects unknown options.
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_INNER: Any = {**_OPTIONS, "no_cpython_wrapper": True}


def compiled(function: Callable, options: dict[str, Any] = _OPTIONS) -> Any:
    """Compiles to serial code that releases the GIL, cached on disk if Numba finds a folder."""
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)


def inner(function: Callable) -> Any:
    """Compiles a function for compiled code only; a call from Python crashes the process."""
    return compiled(function, _INNER)


def by_type(
    position: int, kind: numba.types.Type, if_kind: Callable, otherwise: Callable
) -> Callable:
    """Returns a function for compiled code that is `if_kind` if an argument is a `kind`."""

    def either(*args: object) -> Any:
        raise NotImplementedError("Only compiled code may call this function.")

    # Not strict, because argument names may differ from `args`.
    overload(either, jit_options=_INNER, strict=False)(
        lambda *args: if_kind if args[position] == kind else otherwise
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


def _keep_whole(x, p, rest, i):
    p[i] = x


def _keep_split(x, p, rest, i):
    rounded = bfloat16_bits(x)
    p[i] = rounded
    rest[i] = np.int16(_remainder(x, rounded))


_master = by_type(1, numba.none, lambda p, rest, i: p[i], _joined)
_keep = by_type(2, numba.none, _keep_whole, _keep_split)


@inner
def _remainder(x, rounded):
    """Returns `rest`, the lower half of a master, as uint16."""
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
def _advance(p, rest, at, m, v, at_m, size, gradients, m_debias, v_debias, scalars):
    """Takes the step on `size` neighbours, from element `at` of masters and `at_m` of moments."""
    sums, gs, fs = gradients
    for e in range(size):
        i, j = np.uintp(at + e), np.uintp(at_m + e)
        g, squares = _sum(sums, gs, fs, i)
        x = _master(p, rest, i)
        x, new_m, new_v = _element(x, m[j], v[j], g, squares, m_debias, v_debias, scalars)
        _keep(x, p, rest, i)
        m[j] = new_m
        v[j] = new_v


# The array in which a moment is updated: its values, or scratch.
_work_array = by_type(
    1, numba.none, lambda x, scales, size: x, lambda x, scales, size: np.empty(size, np.float32)
)


@compiled
def adamw(p, rest, m, m_scales, v, v_scales, inputs, width, tile):
    first, last, left, right = tile
    gradients, (active, m_debias, v_debias), scalars = inputs
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
                _convert(m[i:j], m_scales[k:k_end], wide_m[: j - i], b - a, None)
                _convert(v[i:j], v_scales[k:k_end], wide_v[: j - i], b - a, None)
            steps = m_debias[s], v_debias[s]
            _advance(p, rest, i, wide_m, wide_v, at_m, j - i, gradients, *steps, scalars)
            if m_scales is not None:
                _convert(m[i:j], m_scales[k:k_end], wide_m[: j - i], b - a, True)
                _convert(v[i:j], v_scales[k:k_end], wide_v[: j - i], b - a, True)
        s = end


# Moments in codes: int8 for a first moment, and uint8 for a second, whose codes stand for its
# square root. Their scales are bfloat16 and float32.


def _first_decoded(code, scale):
    c = np.float32(code)
    return ((c * (np.abs(c) + _TWICE_BEND)) * _PER_FIRST) * scale


def _second_decoded(code, scale):
    w = (np.float32(code) * _PER_SECOND) * scale
    return w * w


def _first_code(x, inverse, old):
    y = np.sqrt(np.abs(x) * inverse + _BEND_SQUARED) - _BEND
    return np.int8(np.float32(np.copysign(y, x) + _ROUNDER).view(np.uint32))


def _second_code(x, inverse, old):
    y = np.sqrt(x) * inverse
    return max(np.uint8(np.float32(y + _ROUNDER).view(np.uint32)), np.uint8(y > _ZERO))


_decoded = by_type(0, numba.int8, _first_decoded, _second_decoded)
_code = by_type(2, numba.int8, _first_code, _second_code)
# A bucket's stored scale, from its largest magnitude.
_scale = by_type(
    1,
    numba.uint16,
    lambda x, old: bfloat16_bits(_ZERO if x < _LEAST else x),
    lambda x, old: _ZERO if np.sqrt(x) < _LEAST else np.sqrt(x),
)
_top = by_type(0, numba.uint16, lambda scale: _TOP_FIRST, lambda scale: _TOP_SECOND)


@inner
def _inverse(scale):
    wide = _widened(scale)
    return _top(scale) / wide if wide > _ZERO else _ZERO


@inner
def _magnitude(x):
    """Returns the bits of |x|, which sort like the numbers, with NaN last."""
    return np.uint32(np.float32(x).view(np.uint32) & np.uint32(0x7FFFFFFF))


@inner
def _convert(codes, scales, x, width, encode):
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
                    codes[a:b].reshape(shape), scales[k:end], x[a:b].reshape(shape), encode
                )
                k = end


def _decode_buckets(codes, scales, x, encode):
    for b in range(x.shape[0]):
        scale = _widened(scales[b])
        for i in range(x.shape[1]):
            x[b, i] = _decoded(codes[b, i], scale)


def _encode_buckets(codes, scales, x, encode):
    # LLVM vectorizes the search for a maximum only if its length is unknown.
    for b in range(x.shape[0]):
        largest = np.uint32(0)
        for i in range(x.shape[1]):
            bits = _magnitude(x[b, i])
            largest = bits if bits > largest else largest
        scales[b] = _scale(np.uint32(largest).view(np.float32), scales[b])
        inverse = _inverse(scales[b])
        for i in range(x.shape[1]):
            codes[b, i] = _code(x[b, i], inverse, codes[b, i])


_convert_buckets = by_type(3, numba.none, _decode_buckets, _encode_buckets)


@inner
def _buckets(size):
    return (size + BUCKET - 1) // BUCKET


def _convert_codes(values, extra, x, channel, width, left, encode):
    i, k = channel * width + left, channel * _buckets(width) + left // BUCKET
    scales = extra[k : k + _buckets(x.size)]
    _convert(values[i : i + x.size], scales, x, x.size, encode)


def _join(values, extra, x, channel, width, left, encode):
    for e in range(x.size):
        x[e] = _master(values, extra, np.uintp(channel * width + left + e))


def _split(values, extra, x, channel, width, left, encode):
    for e in range(x.size):
        _keep(x[e], values, extra, np.uintp(channel * width + left + e))


_convert_split = by_type(6, numba.none, _join, _split)
_convert_channel = by_type(
    0,
    numba.types.Array(numba.uint16, 1, "C"),
    lambda *args: _convert_split(*args),
    _convert_codes,
)


@compiled
def convert(values, extra, x, channels, width, left, encode):
    """Converts elements from `left` on of some channels between a format and `x`, float32.

    `x` is `(channels, elements)`; `encode` is True to write the format, and None to read it.
    """
    for r in range(channels.size):
        _convert_channel(values, extra, x[r], channels[r], width, left, encode)
