"""Compiled loops for compact moments: the same pass over memory decodes, steps and encodes.

`moments.py` says what codes and units are; `numba_loops.py` has the step's other parts, and the
reasons for how loops are written. A step takes a chunk of its tile at a time: its new moments are
in scratch that stays in the cache until the largest of each group are known, and are encoded then.
Where channels trail, the step's loop decodes on its way, as each lane has its unit beside it. Where
they lead, a group's unit is one number for 32 elements; there LLVM only vectorizes loops that
decode or step, and one that does both is four times as slow.

Letters: as in `numba_loops.py`; `m` and `w` are scratch, `w` the square root of the second moment.
`cm, cv` are codes and `um, uv` their units; all are flat.
"""

from typing import no_type_check

import numba
import numpy as np

from zenflow_jax._host import moments
from zenflow_jax._host.numba_loops import (
    _compiled,
    _inner,
    _keep,
    _master,
    _overload,
    _piece,
    _pieces,
    _sum,
)

# What Numba keeps on disk of these loops has pieces of other files in it, and Numba looks at this
# file alone. So this number is of what they are made of; a test says which to write here.
MADE_OF = 1096083111
GROUP = moments.GROUP
# Elements of a chunk. The scratch of larger ones leaves the first cache, smaller ones cost calls.
_CHUNK = 4096
# Lanes of a chunk of 32 rows. With fewer the scratch (512 KiB) leaves the second cache for the
# first, but each row costs a beginning, and memory is read in shorter pieces.
_LANES = 2048
_BEND, _BEND_SQUARED, _TWICE = moments.BEND, moments.BEND_SQUARED, 2 * moments.BEND
_PER_FIRST, _PER_SECOND = moments.PER_FIRST, moments.PER_SECOND
_LEAST_FIRST, _LEAST_UNIT = moments.LEAST_FIRST, moments.LEAST_UNIT
_ROUNDER, _NAN = moments.ROUNDER, np.float32(np.nan)
_NO_FIRST, _NO_SECOND = np.int8(moments.NO_FIRST), np.uint8(moments.NO_SECOND)
_INFINITE = np.uint32(moments.INFINITE)
_ZERO, _ONE = np.float32(0), np.float32(1)


@_inner
@no_type_check
def _float(bits):
    return np.uint32(bits).view(np.float32)


@_inner
@no_type_check
def _magnitude(x):
    """The bits of |x|: they order numbers as they are ordered, and what is not finite above all."""
    return np.uint32(np.float32(x).view(np.uint32) & np.uint32(0x7FFFFFFF))


def _wide(unit):
    raise NotImplementedError("compiled code only")


@_overload(_wide)
@no_type_check
def _(unit):
    if unit == numba.float32:
        return lambda unit: unit
    return lambda unit: _float(np.uint32(unit) << np.uint32(15))


@_inner
@no_type_check
def _rounded(x, zeros):
    """The bits of `x`, rounded so that so many can be left out, and without them; ties to even."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> zeros) & np.uint32(1))
    half = np.uint32(np.uint32(np.uint32(1) << np.uint32(zeros - np.uint32(1))) - np.uint32(1))
    return np.uint32(np.uint32(bits + np.uint32(half + odd)) >> zeros)


def _is_first(codes):
    return codes.dtype.signed


def _decoded(code, unit):
    raise NotImplementedError("compiled code only")


@_overload(_decoded)
@no_type_check
def _(code, unit):
    def first(code, unit):
        c = np.float32(code)
        x = (c * (np.abs(c) + _TWICE)) * unit
        return x if code != _NO_FIRST else _NAN

    def second(code, unit):
        w = np.float32(code) * unit
        return w if code != _NO_SECOND else _NAN

    return first if code.signed else second


def _code(codes, x, inverse):
    raise NotImplementedError("compiled code only")


@_overload(_code)
@no_type_check
def _(codes, x, inverse):
    """The code of `x`, if it is finite: the lower bits of a sum that has rounded to an integer."""

    def first(codes, x, inverse):
        y = np.sqrt(np.abs(x) * inverse + _BEND_SQUARED) - _BEND
        return np.int8(np.float32(np.copysign(y, x) + _ROUNDER).view(np.uint32))

    def second(codes, x, inverse):
        c = np.uint32(np.float32(x * inverse + _ROUNDER).view(np.uint32) & np.uint32(0xFF))
        return np.uint8(max(c, min(_magnitude(x), np.uint32(1))))

    return first if _is_first(codes) else second


def _unit(codes, largest):
    raise NotImplementedError("compiled code only")


@_overload(_unit)
@no_type_check
def _(codes, largest):
    def first(codes, largest):
        x = _ZERO if largest < _LEAST_FIRST else largest * _PER_FIRST
        return np.uint16(_rounded(x, np.uint32(15)))

    def second(codes, largest):
        x = max(largest * _PER_SECOND, _LEAST_UNIT) if largest > _ZERO else _ZERO
        return _float(_rounded(x, np.uint32(8)) << np.uint32(8))

    return first if _is_first(codes) else second


def _missing(codes):
    raise NotImplementedError("compiled code only")


@_overload(_missing)
@no_type_check
def _(codes):
    if _is_first(codes):
        return lambda codes: _NO_FIRST
    return lambda codes: _NO_SECOND


@_inner
@no_type_check
def _inverse(unit):
    return _ONE / unit if unit > _ZERO else _ZERO


@_inner
@no_type_check
def _finite(bits):
    return bits if bits < _INFINITE else np.uint32(0)


@_inner
@no_type_check
def _decode_groups(codes, units, out):
    """Decodes groups, a row each."""
    for b in range(codes.shape[0]):
        unit = _wide(units[b])
        for i in range(out.shape[1]):
            out[b, i] = _decoded(codes[b, i], unit)


@_inner
@no_type_check
def _encode_groups(codes, units, x, inverse):
    """Encodes groups, a row each; `inverse` is scratch."""
    # LLVM vectorizes the search for a largest number only where its length is not known.
    missing = False
    for b in range(x.shape[0]):
        largest = np.uint32(0)
        for i in range(x.shape[1]):
            bits = _magnitude(x[b, i])
            largest = bits if bits > largest else largest
        missing |= largest >= _INFINITE
        inverse[b] = _float(largest)
    if missing:
        _largest_finite(x, inverse)
    for b in range(x.shape[0]):
        units[b] = _unit(codes, inverse[b])
        inverse[b] = _inverse(_wide(units[b]))
    for b in range(x.shape[0]):
        by = inverse[b]
        for i in range(x.shape[1]):
            codes[b, i] = _code(codes, x[b, i], by)
    if missing:
        _mark(codes, x)


@_inner
@no_type_check
def _largest_finite(x, largest):
    for b in range(x.shape[0]):
        found = np.uint32(0)
        for i in range(x.shape[1]):
            found = max(found, _finite(_magnitude(x[b, i])))
        largest[b] = _float(found)


@_inner
@no_type_check
def _mark(codes, x):
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            if _magnitude(x[b, i]) >= _INFINITE:
                codes[b, i] = _missing(codes)


@_inner
@no_type_check
def _decode(codes, units, out, width):
    """Decodes channels of `width` elements, or one part of a channel."""
    size = codes.size if width % GROUP == 0 else width
    blocks, full = (size + GROUP - 1) // GROUP, size // GROUP
    for s in range(codes.size // size):
        i, k = s * size, s * blocks
        j, end = i + full * GROUP, i + size
        if full:
            some, there = codes[i:j].reshape(full, GROUP), out[i:j].reshape(full, GROUP)
            _decode_groups(some, units[k : k + full], there)
        if j < end:
            some, there = codes[j:end].reshape(1, end - j), out[j:end].reshape(1, end - j)
            _decode_groups(some, units[k + full : k + blocks], there)


@_inner
@no_type_check
def _encode(codes, units, x, width, scratch):
    size = codes.size if width % GROUP == 0 else width
    blocks, full = (size + GROUP - 1) // GROUP, size // GROUP
    for s in range(codes.size // size):
        i, k = s * size, s * blocks
        j, end = i + full * GROUP, i + size
        if full:
            some, there = codes[i:j].reshape(full, GROUP), x[i:j].reshape(full, GROUP)
            _encode_groups(some, units[k : k + full], there, scratch)
        if j < end:
            some, there = codes[j:end].reshape(1, end - j), x[j:end].reshape(1, end - j)
            _encode_groups(some, units[k + full : k + blocks], there, scratch)


@_inner
@no_type_check
def _element(p, m, w, g, m_scale, w_scale, scalars):
    # The root is taken once, for the step and for the code.
    scale, learning_rate, b1, b2, one_minus_b1, one_minus_b2, eps, weight_decay = scalars
    g = g * scale
    m = m * b1 + g * one_minus_b1
    w = np.sqrt((w * w) * b2 + (g * g) * one_minus_b2)
    direction = (m * m_scale) / (w * w_scale + eps) + p * weight_decay
    return p - direction * learning_rate, m, w


@_compiled
@no_type_check
def adamw_leading(
    p, cm, um, cv, uv, gs, fs, origin, rest, active, m_scale, w_scale, scalars, width, tile
):
    first, last, left, right = tile
    m, w = np.empty(_CHUNK, np.float32), np.empty(_CHUNK, np.float32)
    scratch = np.empty(_CHUNK // GROUP, np.float32)
    blocks = (width + GROUP - 1) // GROUP
    together = max(_CHUNK // max(right - left, 1), 1)
    s = first
    while s < last:
        if not active[s]:
            s += 1
            continue
        # Neighbours that take the same step are one piece, as in `numba_loops.py`.
        end = s + 1
        while (
            end < min(last, s + together)
            and active[end]
            and m_scale[end] == m_scale[s]
            and w_scale[end] == w_scale[s]
        ):
            end += 1
        a = left
        while a < right:
            b = min(a + _CHUNK, right)
            i, j = s * width + a, (end - 1) * width + b
            k, e = s * blocks + a // GROUP, (end - 1) * blocks + (b + GROUP - 1) // GROUP
            _decode(cm[i:j], um[k:e], m[: j - i], b - a)
            _decode(cv[i:j], uv[k:e], w[: j - i], b - a)
            _advance_channels(
                p[i:j],
                m[: j - i],
                w[: j - i],
                _pieces(gs, origin, i, j),
                fs,
                _piece(rest, i, j),
                m_scale[s],
                w_scale[s],
                scalars,
            )
            _encode(cm[i:j], um[k:e], m[: j - i], b - a, scratch)
            _encode(cv[i:j], uv[k:e], w[: j - i], b - a, scratch)
            a = b
        s = end


@_inner
@no_type_check
def _advance_channels(p, m, w, gs, fs, rest, m_scale, w_scale, scalars):
    for i in range(p.size):
        g = _sum(None, gs, fs, i)
        p_i = _master(p, rest, i)
        p_i, m_i, w_i = _element(p_i, m[i], w[i], g, m_scale, w_scale, scalars)
        _keep(p_i, p, rest, i, True)
        m[i] = m_i
        w[i] = w_i


@_compiled
@no_type_check
def adamw_trailing(
    p, cm, um, cv, uv, gs, fs, origin, rest, active, m_scale, w_scale, scalars, rows, width, tile
):
    first, last, left, right = tile
    i, j = first * width + left, (last - 1) * width + right
    p, cm, cv, rest, gs = p[i:j], cm[i:j], cv[i:j], _piece(rest, i, j), _pieces(gs, origin, i, j)
    lanes = min(_LANES, right - left)
    m, w = np.empty(GROUP * lanes, np.float32), np.empty(GROUP * lanes, np.float32)
    largest_m, largest_w = np.empty(lanes, np.uint32), np.empty(lanes, np.uint32)
    inverse = np.empty(lanes, np.float32)
    blocks = (rows + GROUP - 1) // GROUP
    s = first
    while s < last:
        group, row = divmod(s, rows)
        height = min(GROUP, rows - row)
        a = left
        while a < right:
            b = min(a + lanes, right)
            size = height * (b - a)
            k = (group * blocks + row // GROUP) * width
            units_m, units_v = um[k + a : k + b], uv[k + a : k + b]
            begin = (s - first) * width + a - left
            channels = slice(group * width + a, group * width + b)
            _advance_rows(
                p,
                cm,
                units_m,
                cv,
                units_v,
                begin,
                width,
                m[:size],
                w[:size],
                gs,
                fs,
                rest,
                active[channels],
                m_scale[channels],
                w_scale[channels],
                scalars,
                largest_m[: b - a],
                largest_w[: b - a],
            )
            more = (active[channels], inverse[: b - a])
            _encode_rows(cm, begin, width, units_m, m[:size], largest_m[: b - a], *more)
            _encode_rows(cv, begin, width, units_v, w[:size], largest_w[: b - a], *more)
            a = b
        s += height


# Below, row `r` of a block begins at the element `begin + r * width` of what is not scratch. Numba
# checks no unsigned index; a slice for each row would take as long as the row.


@_inner
@no_type_check
def _advance_rows(
    p, cm, um, cv, uv, begin, width, m, w, gs, fs, rest, active, m_scale, w_scale, scalars, lm, lw
):
    """Takes the step on a block of rows; new moments are written to scratch."""
    lanes = active.size
    lm[:] = 0
    lw[:] = 0
    for r in range(m.size // lanes):
        i, j = begin + r * width, r * lanes
        for e in range(lanes):
            here, there = np.uintp(i + e), np.uintp(j + e)
            g = _sum(None, gs, fs, here)
            x = _master(p, rest, here)
            old_m, old_w = _decoded(cm[here], _wide(um[e])), _decoded(cv[here], _wide(uv[e]))
            x, m_e, w_e = _element(x, old_m, old_w, g, m_scale[e], w_scale[e], scalars)
            _keep(x, p, rest, here, active[e])
            m[there] = m_e
            w[there] = w_e
            bm, bw = _magnitude(m_e), _magnitude(w_e)
            lm[e] = bm if bm > lm[e] else lm[e]
            lw[e] = bw if bw > lw[e] else lw[e]


@_inner
@no_type_check
def _encode_rows(codes, begin, width, units, x, largest, active, inverse):
    """Encodes a block of rows. Writes every lane, with its new or its old value."""
    lanes = units.size
    x = x.reshape(x.size // lanes, lanes)
    missing = _finite_only(x, largest)
    for e in range(lanes):
        unit = _unit(codes, _float(largest[e]))
        inverse[e] = _inverse(_wide(unit))
        units[e] = unit if active[e] else units[e]
    for r in range(x.shape[0]):
        i = begin + r * width
        for e in range(lanes):
            here = np.uintp(i + e)
            code = _code(codes, x[r, e], inverse[e])
            codes[here] = code if active[e] else codes[here]
    if missing:
        for r in range(x.shape[0]):
            for e in range(lanes):
                if active[e] and _magnitude(x[r, e]) >= _INFINITE:
                    codes[np.uintp(begin + r * width + e)] = _missing(codes)


@_inner
@no_type_check
def _raise_largest(x, largest):
    """The bits of each lane's largest finite magnitude; whether any is not finite."""
    largest[:] = 0
    for r in range(x.shape[0]):
        for e in range(x.shape[1]):
            bits = _magnitude(x[r, e])
            largest[e] = bits if bits > largest[e] else largest[e]
    return _finite_only(x, largest)


@_inner
@no_type_check
def _finite_only(x, largest):
    """Looks again where a lane's largest magnitude is not finite; whether any is."""
    missing = False
    for e in range(largest.size):
        missing |= largest[e] >= _INFINITE
    if missing:
        largest[:] = 0
        for r in range(x.shape[0]):
            for e in range(x.shape[1]):
                largest[e] = max(largest[e], _finite(_magnitude(x[r, e])))
    return missing


def _inside(codes, x):
    raise NotImplementedError("compiled code only")


@_overload(_inside)
@no_type_check
def _(codes, x):
    """What is encoded of a moment: of a second one its root."""
    return (lambda codes, x: x) if _is_first(codes) else (lambda codes, x: np.sqrt(x))


def _outside(codes, x):
    raise NotImplementedError("compiled code only")


@_overload(_outside)
@no_type_check
def _(codes, x):
    return (lambda codes, x: x) if _is_first(codes) else (lambda codes, x: x * x)


@_compiled
@no_type_check
def take_leading(codes, units, some, channels, n, width, tile):
    """Copies channels out, as `numba_loops.move_leading`."""
    first, last, left, right = tile
    blocks = (width + GROUP - 1) // GROUP
    for s in range(first, last):
        group, j = divmod(s, channels.shape[1])
        channel = group * n + channels[group, j]
        here = codes[channel * width + left : channel * width + right]
        there = some[s * width + left : s * width + right]
        mine = units[channel * blocks + left // GROUP : (channel + 1) * blocks]
        _decode(here, mine, there, right - left)
        for i in range(there.size):
            there[i] = _outside(codes, there[i])


@_compiled
@no_type_check
def put_leading(codes, units, some, channels, n, width, tile):
    """Writes channels, as `numba_loops.move_leading`."""
    first, last, left, right = tile
    blocks = (width + GROUP - 1) // GROUP
    x, scratch = np.empty(right - left, np.float32), np.empty(blocks, np.float32)
    for s in range(first, last):
        group, j = divmod(s, channels.shape[1])
        channel = group * n + channels[group, j]
        here = codes[channel * width + left : channel * width + right]
        given = some[s * width + left : s * width + right]
        for i in range(x.size):
            x[i] = _inside(codes, given[i])
        mine = units[channel * blocks + left // GROUP : (channel + 1) * blocks]
        _encode(here, mine, x, right - left, scratch)


@_compiled
@no_type_check
def take_trailing(codes, units, some, channels, n, height, tile):
    """Copies channels out, as `numba_loops.move_trailing`."""
    first, last, left, right = tile
    k, blocks = channels.shape[1], (height + GROUP - 1) // GROUP
    for s in range(first, last):
        group, row = divmod(s, height)
        index = channels[group, left:right]
        block = group * blocks + row // GROUP
        here, mine = codes[s * n : (s + 1) * n], units[block * n : (block + 1) * n]
        there = some[s * k + left : s * k + right]
        for e in range(there.size):
            x = _decoded(here[index[e]], _wide(mine[index[e]]))
            there[e] = _outside(codes, x)


@_compiled
@no_type_check
def put_trailing(codes, units, some, channels, n, height, tile):
    """Writes channels, as `numba_loops.move_trailing`; the tile has whole groups."""
    first, last, left, right = tile
    k, blocks, lanes = channels.shape[1], (height + GROUP - 1) // GROUP, right - left
    scratch, largest = np.empty(GROUP * lanes, np.float32), np.empty(lanes, np.uint32)
    inverse = np.empty(lanes, np.float32)
    s = first
    while s < last:
        group, row = divmod(s, height)
        rows = min(GROUP, height - row)
        index = channels[group, left:right]
        block = group * blocks + row // GROUP
        mine = units[block * n : (block + 1) * n]
        x = scratch[: rows * lanes].reshape(rows, lanes)
        for r in range(rows):
            given = some[(s + r) * k + left : (s + r) * k + right]
            for e in range(lanes):
                x[r, e] = _inside(codes, given[e])
        _raise_largest(x, largest)
        for e in range(lanes):
            unit = _unit(codes, _float(largest[e]))
            mine[index[e]] = unit
            inverse[e] = _inverse(_wide(unit))
        for r in range(rows):
            here = codes[(s + r) * n : (s + r + 1) * n]
            for e in range(lanes):
                missing = _magnitude(x[r, e]) >= _INFINITE
                code = _code(codes, x[r, e], inverse[e])
                here[index[e]] = _missing(codes) if missing else code
        s += rows
