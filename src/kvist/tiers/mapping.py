"""Shared memory mapped so that the kernel can put huge pages behind it, and how to ask for them.

A huge page (2 MiB on most machines) is one entry of the TLB in place of 512: copies and checksums
of blocks run up to several times faster on it, most of all in virtual machines, where a TLB miss
walks two page tables. The kernel gives none to shared memory by itself on most systems, but on
request it moves pages that are there into one (`collapse`, Linux 6.1), if the mapping and the file
are aligned alike. Both calls are requests: where the kernel refuses, small pages work as well.
Neither touches the memory: an address that was unmapped meanwhile makes them fail, nothing else.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MOST_HUGE_BYTES = 32 << 20  # on kernels with pages of 64 KiB a huge one has 512 MiB: not asked for
_NO_ACCESS = 0
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_FAILED = ctypes.c_void_p(-1).value


def _huge_bytes() -> int:
    """Size of a huge page; 0 if there are none, or the administrator wants none."""
    try:
        size = int((_SETTINGS / "hpage_pmd_size").read_text())
        wanted = "[never]" not in (_SETTINGS / "enabled").read_text()
    except (OSError, ValueError):
        return 0
    return size if wanted and size <= _MOST_HUGE_BYTES else 0


HUGE_BYTES = _huge_bytes()


def map_shared(fd: int, size_bytes: int) -> tuple[memoryview, int]:
    """Maps a file's first `size_bytes`, readable and writable, from a huge page's boundary on.

    Returns:
        The bytes and their address. They are unmapped when the last view of them dies.

    Raises:
        OSError: the kernel refuses.
        ValueError: the size is not positive, or the file is shorter.
    """
    if not 0 < size_bytes <= os.fstat(fd).st_size:
        raise ValueError(f"cannot map {size_bytes} bytes of {os.fstat(fd).st_size}")
    align = HUGE_BYTES or mmap.PAGESIZE
    room = _map(None, size_bytes + align, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    at = -(-room // align) * align
    try:
        flags = mmap.MAP_SHARED | _MAP_FIXED
        _map(at, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)
    except OSError:
        _unmap(room, size_bytes + align)
        raise
    pages = (ctypes.c_ubyte * size_bytes).from_address(at)
    weakref.finalize(pages, _unmap, room, size_bytes + align).atexit = False
    return memoryview(pages).cast("B"), at


def populate(address: int, size_bytes: int) -> bool:
    """Makes pages present and writable ahead of their first use; whether the kernel did."""
    return _advise(address, size_bytes, _MADV_POPULATE_WRITE)


def collapse(address: int, size_bytes: int) -> bool:
    """Puts huge pages behind memory that is present; whether the kernel did, for all of it.

    What does not fill a huge page at either end stays as it is.
    """
    if not HUGE_BYTES:
        return False
    first = -(-address // HUGE_BYTES) * HUGE_BYTES
    last = (address + size_bytes) // HUGE_BYTES * HUGE_BYTES
    return last > first and _advise(first, last - first, _MADV_COLLAPSE)


def _advise(address: int, size_bytes: int, advice: int) -> bool:
    done: int = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), advice)
    return done == 0


def _map(at: int | None, size_bytes: int, access: int, flags: int, fd: int) -> int:
    found: int = _libc.mmap(at, size_bytes, access, flags, fd, 0)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {size_bytes} bytes: {os.strerror(code)}")
    return found


def _unmap(at: int, size_bytes: int) -> None:
    _libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size_bytes))
