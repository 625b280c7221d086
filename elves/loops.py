"""Compiled loops: words and their byte planes, differences, ELF's codes.

A block has `n` words of 2, 4 or 8 bytes, as whole numbers. Plane 0 has their lowest bytes. In words
of floats the sign is put behind the rest, by a rotation of one bit: then the plane on top is the
exponent alone (bfloat16, float32), which is what compresses.

Each loop is one pass that LLVM vectorizes: no branches, maxima taken of whole numbers, as NaN
forbids to reorder those of floats. No fastmath flag is set. The functions carry no
annotations that Numba would have to understand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def compiled(function: Callable) -> Any:
    """Serial machine code that releases the GIL, kept on disk.

    Numba keeps it beside this file, else in the user's cache folder. If it can write neither, it
    raises at import; then every process compiles for itself.
    """
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)


# Of a float32: below, the number has a fraction, and adding this rounds it off, ties to even.
_WHOLE = np.float32(2**23)
# Codes have 31 bits beside the sign.
_MOST = np.float32(2**31)


@compiled
def split2(words, rotate, planes):
    back = np.uint16(16 - rotate) & np.uint16(15)
    low, high = planes[0], planes[1]
    for i in range(words.size):
        x = words[i]
        x = np.uint16(np.uint16(x << np.uint16(rotate)) | np.uint16(x >> back))
        x = x if rotate else words[i]
        low[i] = np.uint8(x)
        high[i] = np.uint8(x >> np.uint16(8))


@compiled
def split4(words, rotate, planes):
    a, b, c, d = planes[0], planes[1], planes[2], planes[3]
    for i in range(words.size):
        x = words[i]
        turned = np.uint32(np.uint32(x << np.uint32(1)) | np.uint32(x >> np.uint32(31)))
        x = turned if rotate else x
        a[i] = np.uint8(x)
        b[i] = np.uint8(x >> np.uint32(8))
        c[i] = np.uint8(x >> np.uint32(16))
        d[i] = np.uint8(x >> np.uint32(24))


@compiled
def split8(words, rotate, planes):
    for j in range(8):
        plane = planes[j]
        for i in range(words.size):
            x = words[i]
            turned = np.uint64(np.uint64(x << np.uint64(1)) | np.uint64(x >> np.uint64(63)))
            x = turned if rotate else x
            plane[i] = np.uint8(x >> np.uint64(8 * j))


@compiled
def merge2(low, high, rotate, words):
    for i in range(words.size):
        x = np.uint16(np.uint16(low[i]) | np.uint16(np.uint16(high[i]) << np.uint16(8)))
        turned = np.uint16(np.uint16(x >> np.uint16(1)) | np.uint16(x << np.uint16(15)))
        words[i] = turned if rotate else x


@compiled
def merge4(a, b, c, d, rotate, words):
    for i in range(words.size):
        low = np.uint32(np.uint32(a[i]) | np.uint32(np.uint32(b[i]) << np.uint32(8)))
        high = np.uint32(np.uint32(c[i]) | np.uint32(np.uint32(d[i]) << np.uint32(8)))
        x = np.uint32(low | np.uint32(high << np.uint32(16)))
        turned = np.uint32(np.uint32(x >> np.uint32(1)) | np.uint32(x << np.uint32(31)))
        words[i] = turned if rotate else x


@compiled
def merge(plane, shift, words):
    """Puts one more plane into words, at first the lowest: for all widths, in a pass for each."""
    first = shift == 0
    for i in range(words.size):
        x = np.uint64(plane[i]) << np.uint64(shift)
        words[i] = x if first else words[i] | x


@compiled
def rotate_back(words):
    for i in range(words.size):
        x = words[i]
        words[i] = np.uint64(x >> np.uint64(1)) | np.uint64(x << np.uint64(63))


@compiled
def sampled(plane, counts):
    """Counts the bytes of every 16th stretch of 64; four tables, as equal neighbours would wait for
    each other."""
    counts[:] = 0
    total = 0
    for begin in range(0, plane.size, 1024):
        piece = plane[begin : begin + 64]
        for i in range(piece.size):
            counts[i & 3, piece[i]] += 1
        total += piece.size
    return total


@compiled
def constant(words):
    """Whether all are equal."""
    first, other = words[0], words[0] ^ words[0]
    for i in range(words.size):
        other |= words[i] ^ first
    return other == 0


@compiled
def equal(words, others):
    """Whether each uint64 is the other."""
    other = np.uint64(0)
    for i in range(words.size):
        other |= words[i] ^ others[i]
    return other == 0


# In the order of the numbers that they stand for, floats of one dtype are neighbours if their bits
# are; differences of these places are small where values are close, also across a power of two.
# XOR is what others take: it is 5 % larger on a fine-tune (benchmarks/LOG.md).


@compiled
def difference2(words, base, out):
    top = np.uint16(0x8000)
    for i in range(words.size):
        x, y = words[i], base[i]
        x = np.uint16(~x) if x & top else np.uint16(x | top)
        y = np.uint16(~y) if y & top else np.uint16(y | top)
        d = np.int16(np.uint16(x - y))
        out[i] = np.uint16(np.uint16(d << 1) ^ np.uint16(d >> 15))


@compiled
def difference4(words, base, out):
    top = np.uint32(0x80000000)
    for i in range(words.size):
        x, y = words[i], base[i]
        x = np.uint32(~x) if x & top else np.uint32(x | top)
        y = np.uint32(~y) if y & top else np.uint32(y | top)
        d = np.int32(np.uint32(x - y))
        out[i] = np.uint32(np.uint32(d << 1) ^ np.uint32(d >> 31))


@compiled
def undo_difference2(codes, base, out):
    top = np.uint16(0x8000)
    for i in range(codes.size):
        z, y = codes[i], base[i]
        y = np.uint16(~y) if y & top else np.uint16(y | top)
        d = np.uint16(np.uint16(z >> np.uint16(1)) ^ np.uint16(-np.int32(z & np.uint16(1))))
        x = np.uint16(y + d)
        out[i] = np.uint16(x ^ top) if x & top else np.uint16(~x)


@compiled
def undo_difference4(codes, base, out):
    top = np.uint32(0x80000000)
    for i in range(codes.size):
        z, y = codes[i], base[i]
        y = np.uint32(~y) if y & top else np.uint32(y | top)
        d = np.uint32(np.uint32(z >> np.uint32(1)) ^ np.uint32(-np.int64(z & np.uint32(1))))
        x = np.uint32(y + d)
        out[i] = np.uint32(x ^ top) if x & top else np.uint32(~x)


@compiled
def bfloat16_of(words, out):
    """Bits of float32 as those of bfloat16: to nearest, ties to even; NaN becomes a quiet one."""
    for i in range(words.size):
        x = words[i]
        odd = np.uint32(np.uint32(x >> np.uint32(16)) & np.uint32(1))
        nearest = np.uint32(x + np.uint32(np.uint32(0x7FFF) + odd))
        nan = np.uint32(np.uint32(x & np.uint32(0x80000000)) | np.uint32(0x7FC00000))
        is_nan = np.uint32(x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[i] = np.uint16(np.uint32(nan if is_nan else nearest) >> np.uint32(16))


@compiled
def elf_codes(words, per_step, codes):
    """ELF's code of each float32: its number of steps, the sign behind; of an outlier 0.

    Args:
        words: Bits of float32.
        per_step: 1 over the step, a power of two.
        codes: Where to put them.

    Returns:
        All codes in one by or: how many bits they need.
    """
    every = np.uint32(0)
    for i in range(words.size):
        bits = words[i]
        x = np.uint32(bits & np.uint32(0x7FFFFFFF)).view(np.float32) * per_step
        rounded = (x + _WHOLE) - _WHOLE
        x = rounded if x < _WHOLE else x
        inside = x < _MOST
        steps = np.uint32(np.int64(x if inside else np.float32(0)))
        code = np.uint32(np.uint32(steps << np.uint32(1)) | np.uint32(bits >> np.uint32(31)))
        code = code if inside else np.uint32(0)
        codes[i] = code
        every |= code
    return every


@compiled
def elf_outliers(words, per_step):
    """How many have no code: NaN, infinities, and what is 2**31 steps and more."""
    found = 0
    for i in range(words.size):
        x = np.uint32(words[i] & np.uint32(0x7FFFFFFF)).view(np.float32) * per_step
        found += 0 if x < _MOST else 1
    return found


@compiled
def elf_places(words, per_step, places):
    j = 0
    for i in range(words.size):
        x = np.uint32(words[i] & np.uint32(0x7FFFFFFF)).view(np.float32) * per_step
        if not x < _MOST:
            places[j] = i
            j += 1


@compiled
def elf_words(codes, step, words):
    """The float32 of each code; exact, as a code of more than 24 bits is that of a whole number of
    steps that a float32 had."""
    for i in range(codes.size):
        code = codes[i]
        x = np.float32(np.int64(code >> np.uint32(1))) * step
        sign = np.uint32(np.uint32(code & np.uint32(1)) << np.uint32(31))
        words[i] = np.uint32(np.float32(x).view(np.uint32) | sign)


@compiled
def largest_error(words, restored):
    """Of float32, given as bits: the largest difference, as the bits of a float64."""
    largest = np.int64(0)
    for i in range(words.size):
        x = np.float64(np.uint32(words[i]).view(np.float32))
        x -= np.float64(np.uint32(restored[i]).view(np.float32))
        bits = np.int64(np.float64(x).view(np.int64) & np.int64(0x7FFFFFFFFFFFFFFF))
        bits = np.int64(0) if words[i] == restored[i] else bits
        largest = max(largest, bits)
    return largest


@compiled
def sum_of_squares(words):
    """Of the finite float32 whose bits these are, and how many these are."""
    total, count = 0.0, 0
    for i in range(words.size):
        x = np.float64(np.uint32(words[i]).view(np.float32))
        finite = np.uint32(words[i] & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
        total += x * x if finite else 0.0
        count += 1 if finite else 0
    return total, count
