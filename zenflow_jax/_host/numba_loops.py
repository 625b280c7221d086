"""Compiled loops: AdamW and the sum of gradients in one pass over memory, and rows that move.

`numba_kernel.py` runs them on each tile. bfloat16 arrives as its bits, in uint16 arrays. float16
does not arrive, because Numba has none on CPUs. Every operation rounds once, on its own, as IEEE
754 says: no fastmath flag is set, not even "contract". So the vectorized body of a loop and its
scalar tail give the same bits, and NumPy gives them too. That costs nothing, because the loops wait
for memory (`benchmarks/host_adam.py`).

The functions carry no annotations, and `no_type_check` keeps jaxtyping's import hook from wrapping
them: Numba could not compile the wrapper. Numba makes uint64 of the sum of two uint32, so each step
of bit arithmetic is cast back. Loops count over slices, from zero: Numba checks in the loop an
index that it cannot prove positive, and the check keeps LLVM from vectorizing.

Letters: `p, m, v` master and moments, each `(segments, width)`, flat. Of a split master `p` is the
rounded one and `rest` what it lacks, like `p` (`masters.py`); else `rest` is None. `gs` are four
gradients like them and `fs` their factors; a missing gradient is None and its factor 0.
The first gradient may begin at the element `origin` of the others. A tile has the segments `first`
to `last`, and of each the elements `left` to `right`.

Where rows move, `x` is a leaf's array (or `x` and `rest` its split masters) and `some` has the rows
of its `channels`, `(entries, k)` of `n`; all are flat. A segment is one of these channels, of
`width` elements (leading), or one row of all of them (trailing, `height` rows in a stack entry).
`inward` is True, or None for the other way. A `group` here is a stack entry.
"""

from collections.abc import Callable
from typing import Any, no_type_check

import numba
import numpy as np
from numba.extending import overload

# C code calls none of these functions, and Python none of those inside of others. Numba would write
# ways in for both, which was a third of the time to compile. Both are options of `numba.njit` that
# its manual leaves out; it refuses those that it does not know.
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_INNER: Any = {**_OPTIONS, "no_cpython_wrapper": True}


def _compiled(function: Callable, options: dict[str, Any] = _OPTIONS) -> Any:
    """Serial machine code that releases the GIL and divides as NumPy does, kept on disk.

    Numba keeps it beside this file, else in the user's cache folder. If it can write neither, it
    raises at import; then every process compiles for itself.
    """
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)


def _inner(function: Callable) -> Any:
    """The same for compiled code to call; a call from Python ends the process."""
    return _compiled(function, _INNER)


def _overload(function: Callable) -> Callable[[Callable], Callable]:
    """`numba.extending.overload`, for compiled code to call."""
    return overload(function, jit_options=_INNER)


def _widened(x):
    raise NotImplementedError("compiled code only")


@_overload(_widened)
@no_type_check
def _(x):
    if x == numba.uint16:  # the bits of a bfloat16 are the upper half of a float32
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


def _piece(x, begin, end):
    raise NotImplementedError("compiled code only")


@_overload(_piece)
@no_type_check
def _(x, begin, end):
    if x == numba.none:
        return lambda x, begin, end: None
    return lambda x, begin, end: x[begin:end]


def _plus(total, g, f, i):
    raise NotImplementedError("compiled code only")


@_overload(_plus)
@no_type_check
def _(total, g, f, i):
    if g == numba.none:
        return lambda total, g, f, i: total
    if total == numba.none:
        return lambda total, g, f, i: _widened(g[i]) * f
    return lambda total, g, f, i: total + _widened(g[i]) * f


@_inner
@no_type_check
def _sum(total, gs, fs, i):
    """The sum, one after the other; each product and sum rounds, as in a pass for each."""
    a, b, c, d = gs
    e, f, g, h = fs
    return _plus(_plus(_plus(_plus(total, a, e, i), b, f, i), c, g, i), d, h, i)


def _master(p, rest, i):
    raise NotImplementedError("compiled code only")


@_overload(_master)
@no_type_check
def _(p, rest, i):
    if rest == numba.none:
        return lambda p, rest, i: p[i]

    def joined(p, rest, i):
        rounded = np.uint32(np.uint32(p[i]) << np.uint32(16))
        return np.uint32(rounded + np.uint32(np.int32(rest[i]))).view(np.float32)

    return joined


def _keep(x, p, rest, i, on):
    raise NotImplementedError("compiled code only")


@_overload(_keep)
@no_type_check
def _(x, p, rest, i, on):
    def whole(x, p, rest, i, on):
        p[i] = x if on else p[i]

    def split(x, p, rest, i, on):
        rounded = bfloat16_bits(x)
        p[i] = _chosen(on, rounded, p[i])
        rest[i] = np.int16(_chosen(on, rest_of(x, rounded), np.uint16(rest[i])))

    return whole if rest == numba.none else split


@_inner
@no_type_check
def _chosen(on, new, old):
    """`new` if `on`, else `old`: uint16, bit by bit, as LLVM vectorizes no branch around both."""
    return np.uint16(old ^ np.uint16(np.uint16(old ^ new) & np.uint16(-np.int64(on))))


@_inner
@no_type_check
def rest_of(x, rounded):
    """What a bfloat16, given as its bits, lacks of `x`; both as uint16 (`masters.py`)."""
    bits = np.float32(x).view(np.uint32)
    lower, upper = np.uint16(bits), np.uint16(np.uint32(bits >> np.uint32(16)))
    halfway_down = (lower == np.uint16(0x8000)) & (upper == rounded)
    return np.uint16(lower - np.uint16(halfway_down))


@_compiled
@no_type_check
def bfloat16_bits(x):
    """To nearest, ties to even; a NaN becomes the quiet one of its sign, as in ml_dtypes."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    nearest = np.uint32(bits + np.uint32(np.uint32(0x7FFF) + odd))
    nan = np.uint32(np.uint32(bits & np.uint32(0x80000000)) | np.uint32(0x7FC00000))
    return np.uint16(np.uint32(nearest if x == x else nan) >> np.uint32(16))


@_inner
@no_type_check
def _pieces(gs, origin, begin, end):
    a, b, c, d = gs
    first = _piece(a, begin - origin, end - origin)
    return first, _piece(b, begin, end), _piece(c, begin, end), _piece(d, begin, end)


@_inner
@no_type_check
def _element(p, m, v, g, m_scale, v_scale, scalars):
    scale, learning_rate, b1, b2, one_minus_b1, one_minus_b2, eps, weight_decay = scalars
    g = g * scale
    m = m * b1 + g * one_minus_b1
    v = v * b2 + (g * g) * one_minus_b2
    direction = (m * m_scale) / (np.sqrt(v * v_scale) + eps) + p * weight_decay
    return p - direction * learning_rate, m, v


@_compiled
@no_type_check
def adamw_leading(p, m, v, gs, fs, origin, rest, active, m_scale, v_scale, scalars, width, tile):
    first, last, left, right = tile
    s = first
    while s < last:
        if not active[s]:
            s += 1
            continue
        # Neighbours that take the same step are one piece: a narrow channel costs more to begin
        # than to compute.
        end = s + 1
        while (
            end < last and active[end] and m_scale[end] == m_scale[s] and v_scale[end] == v_scale[s]
        ):
            end += 1
        i, j = s * width + left, (end - 1) * width + right
        _advance_channels(
            p[i:j],
            m[i:j],
            v[i:j],
            _pieces(gs, origin, i, j),
            fs,
            _piece(rest, i, j),
            m_scale[s],
            v_scale[s],
            scalars,
        )
        s = end


@_inner
@no_type_check
def _advance_channels(p, m, v, gs, fs, rest, m_scale, v_scale, scalars):
    for i in range(p.size):
        g = _sum(None, gs, fs, i)
        p_i = _master(p, rest, i)
        p_i, m_i, v_i = _element(p_i, m[i], v[i], g, m_scale, v_scale, scalars)
        _keep(p_i, p, rest, i, True)
        m[i] = m_i
        v[i] = v_i


@_compiled
@no_type_check
def adamw_trailing(
    p, m, v, gs, fs, origin, rest, active, m_scale, v_scale, scalars, rows, width, tile
):
    first, last, left, right = tile
    for s in range(first, last):
        i, j = s * width + left, s * width + right
        group = (s // rows) * width
        channels = slice(group + left, group + right)
        _advance_row(
            p[i:j],
            m[i:j],
            v[i:j],
            _pieces(gs, origin, i, j),
            fs,
            _piece(rest, i, j),
            active[channels],
            m_scale[channels],
            v_scale[channels],
            scalars,
        )


@_inner
@no_type_check
def _advance_row(p, m, v, gs, fs, rest, active, m_scale, v_scale, scalars):
    # Writes every lane, with its new or its old value: LLVM vectorizes a branch around the stores
    # only where the machine has masked ones.
    for i in range(p.size):
        g = _sum(None, gs, fs, i)
        p_i = _master(p, rest, i)
        p_i, m_i, v_i = _element(p_i, m[i], v[i], g, m_scale[i], v_scale[i], scalars)
        _keep(p_i, p, rest, i, active[i])
        m[i] = m_i if active[i] else m[i]
        v[i] = v_i if active[i] else v[i]


def _move(x, rest, i, some, j, inward):
    raise NotImplementedError("compiled code only")


@_overload(_move)
@no_type_check
def _(x, rest, i, some, j, inward):
    # Chosen at compile time: what moves inward is read-only.
    def out_of(x, rest, i, some, j, inward):
        some[j] = _master(x, rest, i)

    def into(x, rest, i, some, j, inward):
        _keep(some[j], x, rest, i, True)

    return out_of if inward == numba.none else into


@_compiled
@no_type_check
def move_leading(x, rest, some, channels, inward, n, width, tile):
    first, last, left, right = tile
    for s in range(first, last):
        group, j = divmod(s, channels.shape[1])
        i = (group * n + channels[group, j]) * width
        here, there = x[i + left : i + right], some[s * width + left : s * width + right]
        rest_here = _piece(rest, i + left, i + right)
        for e in range(there.size):
            _move(here, rest_here, e, there, e, inward)


@_compiled
@no_type_check
def move_trailing(x, rest, some, channels, inward, n, height, tile):
    first, last, left, right = tile
    k = channels.shape[1]
    for s in range(first, last):
        index = channels[s // height, left:right]
        here, there = x[s * n : (s + 1) * n], some[s * k + left : s * k + right]
        rest_here = _piece(rest, s * n, (s + 1) * n)
        for e in range(there.size):
            _move(here, rest_here, index[e], there, e, inward)


@_compiled
@no_type_check
def accumulate(total, gs, fs, first):
    if first:
        for i in range(total.size):
            total[i] = _sum(None, gs, fs, i)
    else:
        for i in range(total.size):
            total[i] = _sum(total[i], gs, fs, i)
