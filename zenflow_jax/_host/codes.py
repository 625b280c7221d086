"""Moments in 8-bit codes: their format, which `numba_loops.py` and `_compact.py` implement.

A bucket of 32 neighbours in a channel has a code for each number, and a single scale: its largest
magnitude. The two moments thus take 1.0625 and 1.125 bytes instead of 4 each. Buckets never span
channels.

* A first moment's code `c` from -127 to 127 stands for `c (|c| + 60) / 23749` times the scale. The
  gap between codes grows fourfold from zero to the largest, as on a softsign curve (FlashOptim,
  https://arxiv.org/abs/2602.23349), but decoding needs no division. A second moment's square root
  is `c / 255` times the scale, for `c` from 0 to 255. Encoding rounds to the nearest code, but to
  at least 1 for a second moment above zero: a second moment of zero would make the step huge.
* The first moment's scale is a bfloat16, the second's is a float32. A bfloat16 scale would never
  shrink there: with `b2` = 0.999, an update shrinks it by 1 in 2000, which would be rounded away.
* Decoded numbers encode to the same codes and scales, because the largest code stands exactly for
  the scale. So checkpoints store float32 moments without loss. A bucket is zero if its numbers (or
  roots) are all below 2**-60. A number that is not finite makes its bucket NaN or infinite.
"""

import numpy as np

#: Number of neighbours in a channel that share a scale in compact moments; fewer at the end.
BUCKET = 32
# A first moment's code is `c (|c| + 2 h)` steps. In float32, the largest, 127 (127 + 2 h), times
# its reciprocal must be exactly 1. That holds for this `h` (not for every number near 30), and for
# 255.
BEND = np.float32(30)
TOP_FIRST, TOP_SECOND = np.float32(127 * (127 + 60)), np.float32(255)
PER_FIRST, PER_SECOND = 1 / TOP_FIRST, 1 / TOP_SECOND
#: Buckets below this are zero.
LEAST = np.float32(2.0**-60)
