"""Hot paths: C++ (`_core`) where it is built, else its Python twin; chosen once, at import.

The environment variable KVIST_NATIVE decides: `auto` (the default) takes C++ when it can be
imported, `on` demands it, `off` takes the twin.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from kvist.native.pagemap import Direction, PageMap

IMPLEMENTATION: Literal["native", "python"]

if TYPE_CHECKING:
    from kvist.native.answers_twin import Answers
    from kvist.native.cachegen_twin import CachegenPlan, RowCoder
    from kvist.native.io_twin import open_pool, open_uring
    from kvist.native.owner_twin import OwnerTable
    from kvist.native.planes_twin import decode_planes, encode_planes
    from kvist.native.quantise_twin import decode_quantised, encode_quantised
    from kvist.native.span_twin import SpanTable
    from kvist.native.table_twin import KeyTable
    from kvist.native.twin import (
        block_keys,
        chain_keys,
        checksum,
        copy_checksum,
        digest,
        move_pages,
        move_pages_checksum,
        unpack_tokens,
    )
else:
    _wish = os.environ.get("KVIST_NATIVE", "auto")
    if _wish not in ("auto", "on", "off"):
        raise ValueError(f"KVIST_NATIVE is {_wish!r}: not auto, on or off")
    try:
        if _wish == "off":
            from kvist.native import twin as _chosen
        else:
            from kvist.native import _core as _chosen
    except ImportError:
        if _wish == "on":
            raise
        from kvist.native import twin as _chosen
    IMPLEMENTATION = "python" if _chosen.__name__.endswith("twin") else "native"
    if IMPLEMENTATION == "native":
        from kvist.native._core import (
            Answers,
            CachegenPlan,
            KeyTable,
            OwnerTable,
            RowCoder,
            SpanTable,
            decode_planes,
            decode_quantised,
            encode_planes,
            encode_quantised,
            open_pool,
            open_uring,
        )
    else:
        from kvist.native.answers_twin import Answers
        from kvist.native.cachegen_twin import CachegenPlan, RowCoder
        from kvist.native.io_twin import open_pool, open_uring
        from kvist.native.owner_twin import OwnerTable
        from kvist.native.planes_twin import decode_planes, encode_planes
        from kvist.native.quantise_twin import decode_quantised, encode_quantised
        from kvist.native.span_twin import SpanTable
        from kvist.native.table_twin import KeyTable
    block_keys = _chosen.block_keys
    chain_keys = _chosen.chain_keys
    checksum = _chosen.checksum
    copy_checksum = _chosen.copy_checksum
    digest = _chosen.digest
    move_pages = _chosen.move_pages
    move_pages_checksum = _chosen.move_pages_checksum
    unpack_tokens = _chosen.unpack_tokens

__all__ = [
    "IMPLEMENTATION",
    "Answers",
    "CachegenPlan",
    "Direction",
    "KeyTable",
    "OwnerTable",
    "PageMap",
    "RowCoder",
    "SpanTable",
    "block_keys",
    "chain_keys",
    "checksum",
    "copy_checksum",
    "decode_planes",
    "decode_quantised",
    "digest",
    "encode_planes",
    "encode_quantised",
    "move_pages",
    "move_pages_checksum",
    "open_pool",
    "open_uring",
    "unpack_tokens",
]
