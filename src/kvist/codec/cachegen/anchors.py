"""The paper's own structure: groups of ten tokens, an 8-bit anchor, deltas to it.

The first token of a group is its anchor, rounded to 8 bits with one scale for all channels of a
layer and kind. The other nine are what they differ from the anchor as a decoder will see it, so
that groups decode side by side, in bins of a fixed size that widens with depth. Numpy only: this is
a family to compare with, and the rows are coded by the same native coder as the others.

Bound: |x - x'| ≤ step / 2 for the nine (before rounding to the dtype), |x| / 127 at most the
vector's largest value / 254 for an anchor.

Source: CacheGen, SIGCOMM 2024, section 5.2.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvist.codec.cachegen.body import Body, Mode
from kvist.codec.cachegen.levels import Level
from kvist.codec.cachegen.plan import anchor_rows, check_shape
from kvist.codec.cachegen.profile import ANCHOR_TOKENS
from kvist.codec.cachegen.table import ProfileTable
from kvist.core.errors import FormatError
from kvist.core.layout import BlockLayout
from kvist.native.cachegen_twin import from_float, to_float

Floats = npt.NDArray[np.float32]
_LARGEST = 1 << 24


class AnchorCoder:
    """Blocks of one layout ↔ bodies of mode 2, or of mode 0. Thread-safe."""

    def __init__(self, table: ProfileTable, level: Level, layout: BlockLayout) -> None:
        """Raises ConfigError: see `plan.check_shape`."""
        check_shape(table, layout)
        self._layout = layout
        self._coder, self._steps = anchor_rows(table, level)
        tokens = np.arange(layout.block_tokens)
        self._anchors = tokens[::ANCHOR_TOKENS]
        self._group = tokens // ANCHOR_TOKENS
        self._others = tokens[tokens % ANCHOR_TOKENS != 0]
        self._scales = layout.layers * layout.kinds * len(self._anchors)
        values = layout.layers * layout.kinds * layout.kv_heads * layout.head_dim
        self.anchor_bytes = 4 * self._scales + values * len(self._anchors)

    def encode(self, block: memoryview) -> Body:
        """The body of a block; as it is if a value is not finite, or too far from its anchor."""
        x = self._values(block)
        if not np.isfinite(x).all():
            return Body(Mode.RAW, whole=block)
        anchors = x[:, :, :, self._anchors]
        scale = np.abs(anchors).max(axis=(2, 4)) / np.float32(127)
        coarse = np.rint(anchors / np.where(scale > 0, scale, 1)[:, :, None, :, None])
        with np.errstate(over="ignore", invalid="ignore"):
            known = self._known(coarse.astype(np.float32), scale)
            delta = x[:, :, :, self._others] - known[:, :, :, self._group[self._others]]
            q = np.rint(delta / self._steps[:, :, None, None, None])
        if not (np.abs(q) < _LARGEST).all():
            return Body(Mode.RAW, whole=block)
        # [layer][kind][head][token][D] -> rows [layer, kind, head, D] of tokens
        rows = q.astype("<i4").swapaxes(3, 4)
        stream, escapes = (b"", b"")
        if len(self._others):
            stream, escapes = self._coder.encode_rows(rows.tobytes())
        ordered = coarse.astype(np.int8).transpose(0, 1, 3, 2, 4)
        whole = scale.astype("<f4").tobytes() + ordered.tobytes()
        return Body(Mode.PAPER, stream, escapes, whole=whole)

    def decode(self, body: Body, out: memoryview) -> None:
        """Fills `out`.

        Raises:
            FormatError: the body is not one of such a block.
        """
        lay, groups = self._layout, len(self._anchors)
        scale = np.frombuffer(body.whole, "<f4", self._scales)
        scale = scale.reshape(lay.layers, lay.kinds, groups)
        coarse = np.frombuffer(body.whole, np.int8, offset=4 * self._scales)
        coarse = coarse.reshape(lay.layers, lay.kinds, groups, lay.kv_heads, lay.head_dim)
        if not np.isfinite(scale).all() or (scale < 0).any():
            raise FormatError("a cachegen body with anchors of no size")
        with np.errstate(over="ignore", invalid="ignore"):
            known = self._known(coarse.transpose(0, 1, 3, 2, 4).astype(np.float32), scale)
            x = np.ascontiguousarray(known[:, :, :, self._group])
            if len(self._others):
                try:
                    rows = self._coder.decode_rows(body.stream, body.escapes, len(self._others))
                except ValueError as exc:
                    raise FormatError(f"a cachegen body that cannot be decoded: {exc}") from exc
                q = np.frombuffer(rows, "<i4").reshape(*x.shape[:3], lay.head_dim, -1)
                step = self._steps[:, :, None, None, None]
                x[:, :, :, self._others] += q.swapaxes(3, 4).astype(np.float32) * step
            elif len(body.stream) or len(body.escapes):
                raise FormatError("a cachegen body of anchors only, with a stream")
        out.cast("B")[:] = from_float(x, lay.dtype).tobytes()

    def _values(self, block: memoryview) -> Floats:
        lay = self._layout
        shape = (lay.layers, lay.kinds, lay.kv_heads, lay.block_tokens, lay.head_dim)
        return to_float(block, lay.dtype).reshape(shape)

    def _known(self, coarse: Floats, scale: Floats) -> Floats:
        """Anchors as a decoder sees them: `[layer, kind, head, group, D]`."""
        return coarse * scale[:, :, None, :, None]
