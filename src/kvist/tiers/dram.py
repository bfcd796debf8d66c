"""The DRAM arena: one shared mapping of fixed-size slots that other processes can map too.

The memory is a memfd: anonymous, mode 0600 by nature (only this user's processes reach it, through
`/proc/<pid>/fd/<fd>`), gone with the last process that maps it. It is sized to full capacity at
once, so the address never changes, but it is sparse: pages are given out on first touch, and freed
slots are handed out again first, so an arena is only as large as it has ever been full.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Self

import msgspec

from kvist.core.errors import ClosedError, StoreError
from kvist.tiers.mapping import map_shared

PAGE_BYTES = 4096


def padded(block_bytes: int) -> int:
    """Bytes of a slot for such blocks: whole pages."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


class ArenaLocator(msgspec.Struct, frozen=True):
    """Where another process of this user finds an arena.

    `base` is what offsets into it begin with, where a client numbers several arenas through. Where
    there is a `life`, a pipe of the same process, whoever maps the arena opens it for writing first
    and keeps it open as long: its reader must know who may still touch the slots.
    """

    pid: int
    fd: int
    size_bytes: int
    slot_bytes: int
    base: int = 0
    life: int = -1

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.fd}"


class ArenaMap:
    """A mapping of an arena: bytes by slot, no allocation.

    Views stay valid after `close`: the descriptor goes at once, the pages when the last view dies.
    """

    def __init__(self, fd: int, size_bytes: int, *, slot_bytes: int, life: int = -1) -> None:
        """Maps `size_bytes` of `fd` and owns the descriptor from here on, and `life` as well."""
        self._fd, self._life = fd, life
        self.size_bytes = size_bytes
        self.slot_bytes = slot_bytes
        try:
            self._bytes, self._address = map_shared(fd, size_bytes)
        except (OSError, ValueError):
            self._close_all()
            raise

    @property
    def fd(self) -> int:
        """The descriptor; -1 once closed."""
        return self._fd

    @property
    def life(self) -> int:
        """The pipe that must stay open as long as this process may touch the slots; -1: none."""
        return self._life

    @property
    def address(self) -> int:
        """Where the mapping begins in this process.

        Raises:
            ClosedError: the mapping was closed.
        """
        if self._fd < 0:
            raise ClosedError("the arena was closed")
        return self._address

    def offset(self, slot: int) -> int:
        """Byte offset of `slot` from the beginning of the mapping."""
        return slot * self.slot_bytes

    def view(self, slot: int) -> memoryview:
        """The `slot_bytes` bytes of `slot`, writable.

        Raises:
            ClosedError: the mapping was closed.
            IndexError: there is no such slot.
        """
        if self._fd < 0:
            raise ClosedError("the arena was closed")
        start = slot * self.slot_bytes
        if slot < 0 or start + self.slot_bytes > self.size_bytes:
            raise IndexError(f"slot {slot} is not in an arena of {self.size_bytes} bytes")
        return self._bytes[start : start + self.slot_bytes]

    def close(self) -> None:
        """Closes the descriptor and unmaps, now or when the last view dies. Idempotent."""
        if self._fd < 0:
            return
        self._bytes.release()
        self._close_all()

    def _close_all(self) -> None:
        """The descriptors; `life` last, since it says that nobody touches the slots."""
        for fd in (self._fd, self._life):
            if fd >= 0:
                os.close(fd)
        self._fd = self._life = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Arena(ArenaMap):
    """The owner's arena: the mapping and its free list.

    Not thread-safe: the store's lock guards it. Freed slots are taken again last in, first out:
    their pages exist and may be in a CPU cache.
    """

    def __init__(self, capacity_bytes: int, *, slot_bytes: int, fd: int | None = None) -> None:
        """Reserves `capacity_bytes // slot_bytes` slots; `slot_bytes` is rounded up to pages.

        `fd` is the memory of another process's arena with slots of this size: it is owned from here
        on if the sizes are right, and grows where it is smaller.

        Raises:
            ValueError: a size is not positive or no slot fits.
            OSError: the kernel refuses the memory.
        """
        if slot_bytes < 1:
            raise ValueError(f"slot_bytes must be positive, not {slot_bytes}")
        slot_bytes = padded(slot_bytes)
        self.capacity_slots = capacity_bytes // slot_bytes
        if self.capacity_slots < 1:
            raise ValueError(f"no slot of {slot_bytes} bytes fits in {capacity_bytes} bytes")
        size_bytes = self.capacity_slots * slot_bytes
        fd = os.memfd_create("kvist-arena", os.MFD_CLOEXEC) if fd is None else fd
        try:
            if os.fstat(fd).st_size < size_bytes:
                os.ftruncate(fd, size_bytes)
        except OSError:
            os.close(fd)
            raise
        super().__init__(fd, size_bytes, slot_bytes=slot_bytes)
        self._warm: list[int] = []
        self._fresh = 0  # slots from here on were never used
        self._used = bytearray(self.capacity_slots)

    @staticmethod
    def attach(source: str | int, size_bytes: int, *, slot_bytes: int = PAGE_BYTES) -> ArenaMap:
        """Maps another process's arena, by path (`ArenaLocator.path`) or inherited descriptor.

        Raises:
            OSError: the owner is gone or is another user.
            ValueError: the arena is smaller than `size_bytes`.
        """
        fd = (
            os.open(source, os.O_RDWR | os.O_CLOEXEC) if isinstance(source, str) else os.dup(source)
        )
        return ArenaMap(fd, size_bytes, slot_bytes=slot_bytes)

    @staticmethod
    def join(locator: ArenaLocator) -> ArenaMap:
        """Maps the arena of a process of this user, and shares its `life` if it has one.

        Raises:
            OSError: the process is gone, has let go of the arena, or is another user's.
            ValueError: the arena is smaller than the locator says.
        """
        life = -1
        if locator.life >= 0:  # non-blocking: without its reader this fails, it must not wait
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
            life = os.open(f"/proc/{locator.pid}/fd/{locator.life}", flags)
        try:
            fd = os.open(locator.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            if life >= 0:
                os.close(life)
            raise
        return ArenaMap(fd, locator.size_bytes, slot_bytes=locator.slot_bytes, life=life)

    def locator(self) -> ArenaLocator:
        """What another process needs to attach."""
        return ArenaLocator(os.getpid(), self.fd, self.size_bytes, self.slot_bytes)

    @property
    def touched_slots(self) -> int:
        """How many slots, from the first on, have ever been handed out."""
        return self._fresh

    @property
    def touched_bytes(self) -> int:
        """How much of the arena has ever been handed out."""
        return self._fresh * self.slot_bytes

    @property
    def free_slots(self) -> int:
        return self.capacity_slots - self._fresh + len(self._warm)

    def alloc(self) -> int | None:
        """A slot for the caller to own, or `None` when all are taken."""
        if self._warm:
            slot = self._warm.pop()
        elif self._fresh < self.capacity_slots:
            slot = self._fresh
            self._fresh += 1
        else:
            return None
        self._used[slot] = 1
        return slot

    def claim(self, slots: Collection[int], *, touched: int) -> None:
        """Takes these very slots, of memory of which a former owner had used `touched` slots.

        Raises:
            StoreError: one is not there or named twice, or something was handed out before.
        """
        wanted = sorted(slots)
        known = all(0 <= slot < self.capacity_slots for slot in wanted)
        if self._fresh or not known or len(set(wanted)) != len(wanted):
            raise StoreError("these slots cannot be taken")
        self._fresh = min(max([touched, *(slot + 1 for slot in wanted[-1:])]), self.capacity_slots)
        for slot in wanted:
            self._used[slot] = 1
        self._warm = [slot for slot in range(self._fresh) if not self._used[slot]]

    def free(self, slot: int) -> None:
        """Gives `slot` back.

        Raises:
            StoreError: it was free already.
        """
        if not (0 <= slot < self.capacity_slots and self._used[slot]):
            raise StoreError(f"slot {slot} is not allocated")
        self._used[slot] = 0
        self._warm.append(slot)

    def used(self, slot: int) -> bool:
        """Whether `slot` has an owner."""
        return bool(self._used[slot])
