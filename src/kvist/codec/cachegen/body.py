"""The body of a `cachegen` payload, behind the head that every payload has.

    offset  bytes  field
         0      1  mode: 0 as it is, 1 tuned, 2 the paper's
         1      3  zeros
         4      4  position of the first token, as the encoder thinks (mode 1)
         8      4  n, tokens left out (mode 1)
        12      4  e, escapes
        16    4·n  which tokens were left out: u32, rising
           n·token  those tokens as they are: `[layer][kind][head][token][D]`
                   mode 2: anchors: scales f32 `[layer][kind][group]`, then i8
                   `[layer][kind][group][head][D]`
             4·e  escapes: i32
                   the rANS stream, to the end

Mode 0 is followed by the block and nothing else.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from enum import IntEnum

from kvist.core.errors import FormatError

_HEAD = struct.Struct("<B3sIII")
_ZEROS = bytes(3)


class Mode(IntEnum):
    """How a body is to be read."""

    RAW = 0
    TUNED = 1
    PAPER = 2


@dataclass(frozen=True, slots=True)
class Body:
    """The parts of a body. `whole` is the tokens left out, the anchors, or the block."""

    mode: Mode
    stream: bytes | memoryview = b""
    escapes: bytes | memoryview = b""
    left_out: bytes | memoryview = b""
    whole: bytes | memoryview = b""
    position: int = 0

    def pack(self) -> bytes:
        """The body's bytes."""
        count = len(self.left_out) // 4
        head = _HEAD.pack(self.mode, _ZEROS, self.position, count, len(self.escapes) // 4)
        return b"".join([head, self.left_out, self.whole, self.escapes, self.stream])


def open_body(body: memoryview, *, token_bytes: int, anchor_bytes: int) -> Body:
    """Cuts a body into its parts; copies nothing.

    Args:
        token_bytes: of one token in the block.
        anchor_bytes: of the anchors of a block, for mode 2.

    Raises:
        FormatError: the parts that it names do not fit into it.
    """
    if len(body) < _HEAD.size:
        raise FormatError(f"a cachegen body of {len(body)} bytes")
    mode, zeros, position, count, escapes = _HEAD.unpack_from(body)
    if mode not in list(Mode) or zeros != _ZEROS:
        raise FormatError(f"a cachegen body of unknown mode {mode}")
    mode = Mode(mode)
    if mode is Mode.RAW:
        if position or count or escapes:
            raise FormatError("a cachegen body as it is that names parts")
        return Body(mode, whole=body[_HEAD.size :])
    if mode is Mode.PAPER and (count or position):
        raise FormatError("a cachegen body of the paper's kind that leaves tokens out")
    whole = count * token_bytes if mode is Mode.TUNED else anchor_bytes
    ends = [_HEAD.size]
    for size in (4 * count, whole, 4 * escapes):
        ends.append(ends[-1] + size)
    if ends[-1] > len(body):
        raise FormatError(f"a cachegen body of {len(body)} bytes that names {ends[-1]}")
    left_out, kept, listed = (body[a:b] for a, b in itertools.pairwise(ends))
    return Body(mode, body[ends[-1] :], listed, left_out, kept, position)
