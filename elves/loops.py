"""Compiled loops for byte planes, differences and ELF's codes.

A block has words of 1, 2, 4 or 8 bytes, as unsigned integers. Plane 0 contains their lowest bytes.
In float words, a rotation by one bit moves the sign to the lowest bit, so that the top plane
contains only the exponent (bfloat16, float32), which compresses well.

LLVM vectorizes the innermost loops. No fastmath flag is set. Stored values are truncated to the
word width; higher bits may be arbitrary before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def compiled(function: Callable) -> Any:
    """Compiles serial machine code that releases the GIL, cached on disk.

    Numba caches it next to this file, or else in the user's cache folder. If it can write to
    neither, it raises an error at import, and every process compiles the loop without a cache.
    """
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)


# Adding this to a smaller float32 rounds it to a whole number, with ties to even.
_WHOLE = np.float32(2**23)
# Codes have 31 bits besides the sign.
MOST = np.float32(2**31)
# Number of words that stay in a core's cache from one plane to the next.
_CHUNK = 4096


@compiled
def split(words, rotate, planes):
    one, top = np.uint64(1), np.uint64(8 * words.itemsize - 1)
    for begin in range(0, words.size, _CHUNK):
        chunk = words[begin : begin + _CHUNK]
        for j in range(len(planes)):
            plane = planes[j, begin : begin + _CHUNK]
            for i in range(chunk.size):
                x = np.uint64(chunk[i])
                turned = (x << one) | (x >> top)
                plane[i] = (turned if rotate else x) >> np.uint64(8 * j)


@compiled
def merge(planes, rotate, words):
    """Undoes `split`; missing top planes are zeros."""
    one, top = np.uint64(1), np.uint64(8 * words.itemsize - 1)
    for begin in range(0, words.size, _CHUNK):
        chunk = words[begin : begin + _CHUNK]
        chunk[:] = 0
        for j in range(len(planes)):
            plane = planes[j, begin : begin + _CHUNK]
            for i in range(chunk.size):
                chunk[i] |= np.uint64(plane[i]) << np.uint64(8 * j)
        if rotate:
            for i in range(chunk.size):
                x = np.uint64(chunk[i])
                chunk[i] = (x >> one) | (x << top)


# If floats of one dtype are ordered by value, those with consecutive bits are neighbours, so close
# values have small rank differences, even across a power of two. XOR, the usual choice, gives 5%
# more bytes for a fine-tuned model (benchmarks/LOG.md). Below, `x ^ every` is `~x`, and the sign of
# a difference moves to its lowest bit.


@compiled
def difference(words, base, out):
    one, top = np.uint64(1), np.uint64(8 * words.itemsize - 1)
    sign = one << top
    every = sign | (sign - one)
    for i in range(words.size):
        x, y = np.uint64(words[i]), np.uint64(base[i])
        x ^= every if x & sign else sign
        y ^= every if y & sign else sign
        d = x - y
        out[i] = (d << one) ^ (np.uint64(0) - ((d >> top) & one))


@compiled
def undo_difference(codes, base, out):
    one, top = np.uint64(1), np.uint64(8 * codes.itemsize - 1)
    sign = one << top
    every = sign | (sign - one)
    for i in range(codes.size):
        z, y = np.uint64(codes[i]), np.uint64(base[i])
        y ^= every if y & sign else sign
        x = y + ((z >> one) ^ (np.uint64(0) - (z & one)))
        out[i] = x ^ (sign if x & sign else every)


@compiled
def elf_codes(words, per_step, codes):
    """Computes ELF's code for each float32: its number of steps, then its sign; 0 for an outlier.

    Args:
        words: The bits of float32 numbers.
        per_step: 1 over the step, a power of two.
        codes: The output.

    Returns:
        The bitwise or of all codes, which shows how many bits they need.
    """
    every = np.uint32(0)
    for i in range(words.size):
        bits = words[i]
        x = np.uint32(bits & np.uint32(0x7FFFFFFF)).view(np.float32) * per_step
        rounded = (x + _WHOLE) - _WHOLE
        x = rounded if x < _WHOLE else x
        inside = x < MOST
        steps = np.uint32(np.int64(x if inside else np.float32(0)))
        code = np.uint32(np.uint32(steps << np.uint32(1)) | np.uint32(bits >> np.uint32(31)))
        code = code if inside else np.uint32(0)
        codes[i] = code
        every |= code
    return every
