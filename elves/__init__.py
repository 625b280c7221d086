"""Makes tensor files smaller, losslessly or, for float32, with a bound on the error.

    elves.save("w.safetensors", {"w": w}, bound=2**-24)
    with elves.open("w.safetensors") as file:
        w = file["w"]

A packed file is a safetensors file whose tensors are bytes. `header.py` describes the file,
`blocks.py` its codecs, and `loops.py` the arithmetic on words. `writing.py` packs, `files.py`
reads, and `folders.py` does both for whole folders. The command is `train/compress.py`.

`atomic.py` writes files atomically. This package never imports the rest of the project; it needs
NumPy, ml_dtypes, Numba and zstandard.

References:
    Su et al., Everything You Always Wanted to Know About Storage Compressibility of Pre-Trained ML
    Models but Were Afraid to Ask, https://arxiv.org/abs/2402.13429, 2024 (ELF and Elves).
"""

from __future__ import annotations

from elves.files import open_tensors as open
from elves.header import ElvesError, is_packed
from elves.writing import save

__all__ = ["ElvesError", "is_packed", "open", "save"]
