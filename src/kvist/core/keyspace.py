"""The keyspace: a fingerprint of everything besides tokens that changes KV bytes.

Never in it: tensor- or pipeline-parallel size, rank, engine, path, host name, hash seeds,
speculative settings. A wrong hit is the worst bug this system can have; a field missing here is
how it would happen.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvist.core.layout import BlockLayout

SCHEMA = 1  # raise when the meaning of the canonical block or of a key changes


@dataclass(frozen=True, slots=True)
class Keyspace:
    """What two blocks must have in common for equal tokens to mean equal KV.

    `weights` identifies the weights by content (`commit:<sha>` or `digest:<hex>`), never by path.
    `rope`, `windows` and `quantisation` are canonical JSON texts of the model's own settings.
    """

    weights: str
    layout: BlockLayout
    rope: str
    windows: str = "null"
    quantisation: str = "null"
    activation_dtype: str = ""

    def canonical_bytes(self) -> bytes:
        """UTF-8 JSON, keys sorted, no spaces: the bytes whose digest is the fingerprint."""
        lay = self.layout
        fields = {
            "schema": SCHEMA,
            "weights": self.weights,
            "layers": lay.layers,
            "kinds": lay.kinds,
            "kv_heads": lay.kv_heads,
            "head_dim": lay.head_dim,
            "block_tokens": lay.block_tokens,
            "kv_dtype": lay.dtype,
            "activation_dtype": self.activation_dtype,
            "rope": self.rope,
            "windows": self.windows,
            "quantisation": self.quantisation,
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
