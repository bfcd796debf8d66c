from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvist.native.pagemap import Direction, PageMap

def digest(data: Buffer) -> bytes: ...
def checksum(data: Buffer) -> int: ...
def checksum_variants(data: Buffer) -> list[int]: ...
def copy_checksum(dst: Buffer, src: Buffer) -> int: ...
def chain_keys(
    seed: bytes,
    tokens: Sequence[int] | npt.NDArray[np.uint32],
    block_tokens: int,
    extras: Mapping[int, bytes] | None = None,
) -> list[bytes]: ...
def move_pages(
    direction: Direction,
    slots: npt.NDArray[np.uint64],
    pages: npt.NDArray[np.int64],
    page_map: PageMap,
    threads: int = 1,
) -> None: ...
def move_pages_checksum(
    direction: Direction,
    slots: npt.NDArray[np.uint64],
    pages: npt.NDArray[np.int64],
    page_map: PageMap,
    threads: int = 1,
) -> list[int]: ...
