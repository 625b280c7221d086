"""The header of a packed file: what is in it, and whether it is as it was written.

    8 bytes                      the length of the header, as in every safetensors file
    __metadata__["elves"]        JSON: version; what each tensor was; how it is packed; its blocks
    __metadata__["elves_crc32"]  the CRC-32 of that text
    NAME                         U8: the blocks of the tensor NAME, one behind the other
    spaces                       as many as the header had been reserved beyond what it takes

So any reader of safetensors opens the file and finds bytes, and nothing can be run by reading it.
The reader here writes the header anew from what it has understood and compares: what is not byte
for byte what it would have written, is damaged.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elves.blocks import BLOCK, CODECS, HEAD
from elves.dtypes import WIDTHS
from elves.errors import ElvesError

VERSION = 1
SAFETENSORS, BYTES = "safetensors", "bytes"
#: The codec of a tensor that has no blocks of its own.
DUPLICATE = "duplicate"
# No header is that long: it is 12 bytes for each MiB and some 200 for each tensor.
_LONGEST = 2**30
# Of the header of the file that was packed.
_LONGEST_HEAD = 100_000_000
REMEDY = "Copy the file again, or take another copy."


@dataclass(frozen=True)
class Of:
    """The tensor that another one equals, or nearly equals.

    Attributes:
        where: "file" (this one), "folder" (`file` is a path from the folder of this one) or "base"
            (`file` is a path in the folder that was given as `base`).
        file: "" for this file.
        tensor: Its name there.
        crc32: Of its bytes, restored if it is packed itself.
    """

    where: str
    file: str
    tensor: str
    crc32: int


@dataclass(frozen=True)
class Tensor:
    """A tensor as it was, and how it is packed.

    Attributes:
        name: As it was.
        dtype: The name that safetensors has for it.
        shape: As it was.
        bytes: As it was.
        codec: That of most blocks, for people: each block says its own.
        bound: The largest error that was allowed; None for none.
        error: The largest one that was made.
        crc32: Of the restored bytes.
        of: What it is a duplicate of or differs from.
        blocks: The size of each block as it is in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    codec: str
    bound: float | None
    error: float
    crc32: int
    of: Of | None
    blocks: tuple[int, ...]

    @property
    def width(self) -> int:
        return WIDTHS.get(self.dtype, 1)

    @property
    def packed_bytes(self) -> int:
        return sum(self.blocks)


@dataclass(frozen=True)
class Header:
    """What a packed file says of itself.

    Attributes:
        kind: "safetensors", or "bytes" for the pieces of some other file.
        head: What is in front of the tensors of the file that was packed, compressed by zlib.
        bytes: Of the whole file that was packed.
        crc32: Of it as it is restored.
        base: The folder of the tensors with `of.where` "base"; None if there are none.
        tensors: By name, in the order of the file.
    """

    kind: str
    head: bytes
    bytes: int
    crc32: int
    base: str | None
    tensors: Mapping[str, Tensor]

    def unpacked_head(self) -> bytes:
        """What is in front of the tensors of the file that was packed."""
        return zlib.decompress(self.head) if self.head else b""


def blocks_of(size: int) -> int:
    """How many blocks so many bytes have."""
    return -(-size // BLOCK)


def longest(header: Header) -> int:
    """The bytes that the header takes at most, whatever becomes of its blocks."""
    tensors = {
        name: dataclasses.replace(
            t,
            codec=max([*CODECS, DUPLICATE], key=len),
            error=1.2345678901234567e-300,
            crc32=2**32 - 1,
            blocks=tuple(min(BLOCK, t.bytes - i * BLOCK) + HEAD for i in range(blocks_of(t.bytes))),
        )
        for name, t in header.tensors.items()
    }
    return len(encoded(dataclasses.replace(header, crc32=2**32 - 1, tensors=tensors)))


def encoded(header: Header, length: int | None = None) -> bytes:
    """The header as it is in front of the blocks, `length` bytes long if that is given."""
    tensors = {}
    for t in header.tensors.values():
        one = dataclasses.asdict(t)
        del one["name"]
        one["of"] = None if t.of is None else [t.of.where, t.of.file, t.of.tensor, t.of.crc32]
        tensors[t.name] = one
    text = _json(
        {
            "version": VERSION,
            "block_bytes": BLOCK,
            "kind": header.kind,
            "head": base64.b64encode(header.head).decode(),
            "bytes": header.bytes,
            "crc32": header.crc32,
            "base": header.base,
            "tensors": tensors,
        }
    )
    outer: dict[str, Any] = {
        "__metadata__": {"elves": text, "elves_crc32": f"{zlib.crc32(text.encode()):08x}"}
    }
    end = 0
    for t in header.tensors.values():
        begin, end = end, end + t.packed_bytes
        outer[t.name] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    found = _json(outer).encode()
    # Aligned, and with room: the blocks are written first.
    room = -(8 + len(found)) % 64 if length is None else length - 8 - len(found)
    assert room >= 0, f"{length} bytes reserved for a header of {8 + len(found)}"
    found += b" " * room
    return len(found).to_bytes(8, "little") + found


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def is_packed(path: Path) -> bool:
    """Whether a file says that it is one of these; it may be damaged."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # It is first, and so is what it begins with.
            return length < _LONGEST and file.read(26).startswith(b'{"__metadata__":{"elves":"')
    except OSError:
        return False


def read_header(path: Path) -> tuple[Header, int]:
    """The header of a packed file, and where its blocks begin.

    Raises:
        ElvesError: If it is none, is damaged or not all there, or is of another version.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= _LONGEST:
                raise ValueError(f"a header of {length} bytes")
            raw = file.read(length)
            size = file.seek(0, 2)
    except OSError as error:
        raise ElvesError(
            f"expected a packed file {path}, got none that can be read ({error.strerror}). Check "
            "the path."
        ) from error
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    try:
        if len(raw) < length:
            raise ValueError(f"{len(raw)} bytes of a header of {length}")
        outer = json.loads(raw)
        text = outer["__metadata__"]["elves"]
        crc32 = int(outer["__metadata__"]["elves_crc32"], 16)
        if zlib.crc32(text.encode()) != crc32:
            raise ValueError("a description with another checksum")
        said = json.loads(text)
        version = said["version"]
        header = _header(said) if version == VERSION else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}"[:200]) from error
    if header is None:
        raise ElvesError(
            f"expected a packed file of version {VERSION}, got {path} of version {version}. Read "
            "it with the program that wrote it, or a newer one."
        )
    if encoded(header, 8 + length) != len(raw).to_bytes(8, "little") + raw:
        raise _damaged(path, "one that was changed")
    begin = 8 + length
    end = begin + sum(t.packed_bytes for t in header.tensors.values())
    if size != end:
        last = [t for t in header.tensors.values() if t.blocks][-1:]
        where = "".join(f", the end of `{t.name}`, block {len(t.blocks) - 1}" for t in last)
        raise _damaged(path, f"a file of {size} bytes in place of {end}{where}")
    return header, begin


def _damaged(path: Path, what: str) -> ElvesError:
    return ElvesError(
        f"expected the header of {path} as it was written, got {what}. Nothing of the file was "
        f"read. {REMEDY}"
    )


def _header(said: Mapping[str, Any]) -> Header:
    """What the text says, if it can be true. Raises ValueError and what comes of wrong types."""
    if said["block_bytes"] != BLOCK:
        raise ValueError(f"blocks of {said['block_bytes']} bytes")
    if said["kind"] not in (SAFETENSORS, BYTES):
        raise ValueError(f"the kind {said['kind']}")
    try:
        head = base64.b64decode(said["head"], validate=True)
    except binascii.Error as error:
        raise ValueError("a head that is no base64") from error
    room = _check_head(head)
    tensors = {name: _tensor(name, one) for name, one in said["tensors"].items()}
    size = _whole(said["bytes"])
    if size != room + sum(t.bytes for t in tensors.values()):
        raise ValueError(f"{size} bytes, which its tensors do not have")
    base = said["base"]
    if not (base is None or isinstance(base, str)):
        raise ValueError(f"the base {base}")
    return Header(said["kind"], head, size, _whole(said["crc32"]), base, tensors)


def _check_head(head: bytes) -> int:
    if not head:
        return 0
    reader = zlib.decompressobj()
    try:
        found = len(reader.decompress(head, _LONGEST_HEAD))
    except zlib.error as error:
        raise ValueError("a head that cannot be read") from error
    if not reader.eof:
        raise ValueError("a head that is too long")
    return found


def _tensor(name: str, said: Mapping[str, Any]) -> Tensor:
    shape = tuple(_whole(n) for n in said["shape"])
    size, dtype, codec = _whole(said["bytes"]), said["dtype"], said["codec"]
    if codec not in (*CODECS, DUPLICATE) or not isinstance(dtype, str):
        raise ValueError(f"`{name}` of {dtype} in {codec}")
    if dtype in WIDTHS and math.prod(shape) * WIDTHS[dtype] != size:
        raise ValueError(f"`{name}`, {dtype} of the shape {shape}, in {size} bytes")
    of = None
    if said["of"] is not None:
        where, file, other, of_crc32 = said["of"]
        if where not in ("file", "folder", "base") or not isinstance(file + other, str):
            raise ValueError(f"`{name}` of {said['of']}")
        of = Of(where, file, other, _whole(of_crc32))
    sizes: Sequence[Any] = said["blocks"]
    blocks = tuple(_whole(n) for n in sizes)
    # So that what is restored is bounded by what is there: no small file asks for much memory.
    expected = 0 if codec == DUPLICATE else blocks_of(size)
    if len(blocks) != expected or (codec == DUPLICATE and of is None):
        raise ValueError(f"`{name}` with {len(blocks)} blocks in place of {expected}")
    if not all(HEAD < n <= BLOCK + HEAD for n in blocks):
        raise ValueError(f"`{name}` with a block of an impossible size")
    bound, error = said["bound"], said["error"]
    if not (bound is None or (type(bound) is float and bound > 0)) or type(error) is not float:
        raise ValueError(f"`{name}` with the bound {bound} and the error {error}")
    return Tensor(name, dtype, shape, size, codec, bound, error, _whole(said["crc32"]), of, blocks)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} in place of a whole number")
    return value
