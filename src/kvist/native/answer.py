"""How a block that another node sends begins: what C++, its twin and `node.peers` agree upon."""

from __future__ import annotations

import struct

# Index in the request, whether it is a block, bytes that follow, their XXH3-64, the key.
BLOCK = struct.Struct("<IIQQ32s")
POSITION = struct.Struct("<QQ")
MISS, HIT = 0, 1
DAMAGED = 2  # never on the wire: the bytes are not those of the checksum
KEY_BYTES = 32
