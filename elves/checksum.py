"""CRC-32, as zlib has it, but at the speed of memory where processors multiply without carry.

Most of a restored block's time would else be that of its checksum.

References:
    Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ, Intel, 2009.
"""

from __future__ import annotations

import functools
import platform
import zlib
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from elves.loops import compiled

# x**(512+64), x**512, x**(128+64), x**128 modulo the polynomial, bits reversed: what 64 and 16
# bytes further on are worth.
_BY_64, _BY_16 = (0x1_5444_2BD4, 0x1_C6E4_1596), (0x1_7519_97D0, 0x0_CCAA_009E)
# Below, a call costs more than it gains.
_LEAST = 512


@intrinsic
def _fold(typingctx: Any, data: Any, count: Any, state: Any) -> Any:
    """Folds `count` pieces of 64 bytes into a state of 64, and that into its first 16 bytes."""

    def code(context, builder, signature, arguments):
        lanes, i64 = ir.VectorType(ir.IntType(64), 2), ir.IntType(64)
        data, count, state = arguments
        data = builder.inttoptr(data, lanes.as_pointer())
        state = builder.inttoptr(state, lanes.as_pointer())
        kind = ir.FunctionType(lanes, [lanes, lanes, ir.IntType(8)])
        multiply = builder.module.declare_intrinsic("llvm.x86.pclmulqdq", (), kind)

        def further(x, factors, more):
            k = ir.Constant(lanes, [ir.Constant(i64, f) for f in factors])
            low = builder.call(multiply, [x, k, ir.Constant(ir.IntType(8), 0x00)])
            high = builder.call(multiply, [x, k, ir.Constant(ir.IntType(8), 0x11)])
            return builder.xor(builder.xor(low, high), more)

        def load(pointer, index):
            return builder.load(builder.gep(pointer, [index]), align=1)

        before = builder.block
        loop, body, end = (builder.append_basic_block(x) for x in ("loop", "body", "end"))
        first = [load(state, ir.Constant(i64, j)) for j in range(4)]
        builder.branch(loop)
        builder.position_at_end(loop)
        i = builder.phi(i64)
        i.add_incoming(ir.Constant(i64, 0), before)
        xs = [builder.phi(lanes) for _ in range(4)]
        for x, value in zip(xs, first, strict=True):
            x.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", i, count), body, end)
        builder.position_at_end(body)
        place = builder.mul(i, ir.Constant(i64, 4))
        for j, x in enumerate(xs):
            more = load(data, builder.add(place, ir.Constant(i64, j)))
            x.add_incoming(further(x, _BY_64, more), body)
        i.add_incoming(builder.add(i, ir.Constant(i64, 1)), body)
        builder.branch(loop)
        builder.position_at_end(end)
        x = xs[0]
        for other in xs[1:]:
            x = further(x, _BY_16, other)
        builder.store(x, state, align=1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), code


@compiled
def _folded(data, state):
    _fold(data.ctypes.data, data.size // 64, state.ctypes.data)  # type: ignore[call-arg]


def _folds() -> bool:
    return platform.machine() in ("x86_64", "AMD64") and bool(
        binding.get_host_cpu_features().get("pclmul")
    )


def crc32(data: Any, value: int = 0) -> int:
    """As `zlib.crc32`, for one-dimensional arrays of bytes.

    Args:
        data: uint8, contiguous.
        value: Of what is in front of it.
    """
    if data.size < _LEAST or not _FOLDS:
        return zlib.crc32(data, value)
    whole = data.size // 64 * 64
    state = np.array(data[:64])
    state[:4].view(np.uint32)[0] ^= np.uint32(value ^ 0xFFFFFFFF)
    _folded(data[64:whole], state)
    # The 16 bytes stand for all that is in front of the rest, from a register of zero on.
    return zlib.crc32(data[whole:], zlib.crc32(state[:16], 0xFFFFFFFF))


_FOLDS = _folds()


def combined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two stretches of bytes, one behind the other, from those of each.

    Args:
        first, second: Their checksums.
        length: Of the second, in bytes.
    """
    return _product(first, _power(length)) ^ second


@functools.lru_cache(maxsize=64)  # nearly all blocks are of one length
def _power(length: int) -> int:
    """What so many bytes of zeros are worth: x**(8 * length) modulo the polynomial, by squaring."""
    # Bits are reversed, so the highest one is the number 1.
    power, factor = 0x80000000, 0x00800000  # 1 and x**8
    while length:
        if length & 1:
            power = _product(power, factor)
        factor = _product(factor, factor)
        length >>= 1
    return power


def _product(a: int, b: int) -> int:
    found = 0
    for _ in range(32):
        if a & 0x80000000:
            found ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (0xEDB88320 if b & 1 else 0)
    return found
