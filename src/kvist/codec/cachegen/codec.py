"""`BlockCodec` of one level: heads, tables and levels proven, then the body."""

from __future__ import annotations

import threading

import numpy as np

from kvist.codec.cachegen.anchors import AnchorCoder
from kvist.codec.cachegen.body import Body, Mode, open_body
from kvist.codec.cachegen.levels import BY_NUMBER, Family, Level
from kvist.codec.cachegen.plan import check_shape, tuned_plan
from kvist.codec.cachegen.position import MAX_POSITION, Turning
from kvist.codec.cachegen.table import ProfileTable
from kvist.codec.payload import CodecId, PayloadHead, layout_tag, open_payload
from kvist.core.errors import FormatError
from kvist.core.layout import BlockLayout


class _TunedCoder:
    """Bodies of mode 1. Thread-safe."""

    anchor_bytes = 0

    def __init__(self, table: ProfileTable, level: Level, layout: BlockLayout) -> None:
        self._plan = tuned_plan(table, level, layout)
        self._turning = Turning(table, layout.block_tokens, layout.dtype)
        self._layout = layout

    def encode(self, block: memoryview) -> Body:
        """The body of a block; as it is if hardly a token is like what the table knows."""
        position = self._turning.find(block)
        left_out, stream, escapes = self._plan.encode(block, *self._turning.angles(position))
        missing = np.frombuffer(left_out, "<u4").astype(np.int64)
        if 2 * len(missing) >= max(2, self._layout.block_tokens):
            return Body(Mode.RAW, whole=block)
        whole = np.ascontiguousarray(self._tokens(block)[:, missing]).tobytes()
        return Body(Mode.TUNED, stream, escapes, left_out, whole, position)

    def decode(self, body: Body, out: memoryview) -> None:
        """Fills `out`.

        Raises:
            FormatError: the body is not one of such a block.
        """
        if body.position > MAX_POSITION:
            raise FormatError(f"a cachegen body of a block at position {body.position}")
        cosine, sine = self._turning.angles(body.position)
        try:
            self._plan.decode(body.stream, body.escapes, body.left_out, out, cosine, sine)
        except ValueError as exc:
            raise FormatError(f"a cachegen body that cannot be decoded: {exc}") from exc
        if len(body.left_out):
            missing = np.frombuffer(body.left_out, "<u4").astype(np.int64)
            width = self._layout.head_dim * self._layout.itemsize
            kept = np.frombuffer(body.whole, np.uint8).reshape(-1, len(missing), width)
            self._tokens(out)[:, missing] = kept

    def _tokens(self, block: memoryview) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
        """`[region, token, bytes]` of a block."""
        width = self._layout.head_dim * self._layout.itemsize
        tokens = self._layout.block_tokens
        return np.frombuffer(block, np.uint8).reshape(-1, tokens, width)


class Cachegen:
    """`BlockCodec` of one level and table for one layout; lossy."""

    def __init__(self, table: ProfileTable, level: Level, layout: BlockLayout) -> None:
        """Binds a table to a level and a layout.

        Raises:
            ConfigError: the table is of another model, or the dtype is none that it codes.
        """
        self.name = level.name
        self.level = level
        self._id = table.id
        self._layout = layout
        self._tag = layout_tag(layout)
        check_shape(table, layout)
        # A store can read every level and mostly meets one: the arrays are made at first use.
        self._table: ProfileTable | None = table
        self._made: _TunedCoder | AnchorCoder | None = None
        self._lock = threading.Lock()

    @property
    def _coder(self) -> _TunedCoder | AnchorCoder:
        with self._lock:
            if self._made is None:
                assert self._table is not None
                kind = _TunedCoder if self.level.family is Family.TUNED else AnchorCoder
                self._made = kind(self._table, self.level, self._layout)
                self._table = None
            return self._made

    def encode(self, block: memoryview) -> bytes:
        """See `BlockCodec`: never more than the block and 80 bytes.

        Raises:
            FormatError: `block` is not of the layout's size.
        """
        raw_bytes = self._layout.block_bytes
        if block.nbytes != raw_bytes:
            raise FormatError(f"a block has {raw_bytes} bytes, not {block.nbytes}")
        block = block.cast("B")
        body = self._coder.encode(block).pack()
        if len(body) > raw_bytes:
            body = Body(Mode.RAW, whole=block).pack()
        head = PayloadHead(
            CodecId.CACHEGEN,
            raw_bytes=raw_bytes,
            body_bytes=len(body),
            level=self.level.number,
            table=self._id,
            layout=self._tag,
        )
        return head.pack() + body

    def decode(self, stored: memoryview, out: memoryview) -> None:
        """See `Decoder`. On an error the bytes of `out` are undefined.

        Raises:
            FormatError: the payload is of another level, table, layout or size, or damaged.
        """
        head, view = open_payload(
            stored, codec=CodecId.CACHEGEN, raw_bytes=out.nbytes, layout=self._tag
        )
        if head.table != self._id:
            raise FormatError(
                f"a payload of cachegen table {head.table.hex()}, not {self._id.hex()}"
            )
        if head.level != self.level.number:
            known = BY_NUMBER.get(head.level)
            raise FormatError(
                f"a payload of {known.name if known else head.level}, not {self.level.name}"
            )
        if out.nbytes != self._layout.block_bytes:
            raise FormatError(f"a block has {self._layout.block_bytes} bytes, not {out.nbytes}")
        coder = self._coder
        body = open_body(
            view, token_bytes=self._layout.token_bytes, anchor_bytes=coder.anchor_bytes
        )
        wanted = Mode.PAPER if self.level.family is Family.PAPER else Mode.TUNED
        if body.mode is Mode.RAW:
            if len(body.whole) != out.nbytes:
                raise FormatError(f"a block as it is of {len(body.whole)} bytes")
            out.cast("B")[:] = body.whole
        elif body.mode is wanted:
            coder.decode(body, out.cast("B"))
        else:
            raise FormatError(f"a cachegen body of mode {body.mode} at level {self.level.name}")
