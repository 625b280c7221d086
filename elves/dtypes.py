"""The dtypes of safetensors: how wide a word is, and where floats have their sign and exponent."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

#: Bytes of a word. A dtype that is not listed is one of bytes.
WIDTHS: Mapping[str, int] = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}

#: Those whose words have a sign, an exponent and a fraction.
FLOATS = ("F64", "F32", "F16", "BF16")

#: As NumPy arrays.
NUMPY: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

NAMES: Mapping[np.dtype, str] = {dtype: name for name, dtype in NUMPY.items()}
