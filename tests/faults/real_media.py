"""Disks that the kernel makes fail: a small tmpfs, an ext4 on a loop device, stopped threads."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

COMMAND_TIMEOUT_S = 30.0
IMAGE_BYTES = 16 << 20
_PR_SET_PTRACER = 0x59616D61

# Stops threads one by one, as SIGSTOP cannot; they go on when this process ends, however it does.
_TRACER = """
import ctypes, os, sys
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
for thread in map(int, sys.argv[1:]):
    for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT
        if ptrace(request, thread, None, None):
            sys.exit(os.strerror(ctypes.get_errno()))
    os.waitpid(thread, 0x40000000)  # __WALL
print("stopped", flush=True)
sys.stdin.read()
"""


def run(*command: str) -> str:
    """Runs a command that needs root or a tool; returns what it says. Skips where it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        pytest.skip(f"no {command[0]} here")
    if done.returncode:
        pytest.skip(f"{' '.join(command[:2])} is refused: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def small_tmpfs(where: Path, *, size_bytes: int) -> Iterator[Path]:
    """Mounts a tmpfs of `size_bytes`."""
    where.mkdir()
    run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "kvist-test", str(where))
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], timeout=COMMAND_TIMEOUT_S, check=True)


@dataclass(frozen=True, slots=True)
class LoopDisk:
    """An ext4 in the file `image`, mounted at `where`; `device` is the loop device's name."""

    image: Path
    where: Path
    device: str

    def make_read_only(self) -> None:
        """What the kernel does upon a fatal error: read-only at once, whatever is open."""
        trigger = Path("/sys/fs/ext4") / self.device / "trigger_fs_error"
        try:
            trigger.write_text("kvist-test")
        except OSError as error:
            pytest.skip(f"this kernel's ext4 cannot be made to fail: {error}")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Writes hang in the kernel meanwhile."""
        run("fsfreeze", "-f", str(self.where))
        try:
            yield
        finally:
            subprocess.run(
                ["fsfreeze", "-u", str(self.where)], timeout=COMMAND_TIMEOUT_S, check=True
            )

    @contextmanager
    def unreadable(self) -> Iterator[None]:
        """Reads fail with EIO meanwhile: the blocks behind the device are gone."""
        fd = os.open(self.where, os.O_RDONLY)
        try:
            _syncfs(fd)
        finally:
            os.close(fd)
        held = self.image.read_bytes()
        os.truncate(self.image, 4096)
        try:
            yield
        finally:
            with self.image.open("r+b") as file:
                file.write(held)


def _syncfs(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).syncfs(fd):
        raise OSError(ctypes.get_errno(), "syncfs")


@contextmanager
def loop_disk(folder: Path, *, check: bool = False) -> Iterator[LoopDisk]:
    """Makes (or, if there is one, checks and mounts again) an ext4 in `folder`."""
    image, where = folder / "image", folder / "mount"
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        where.mkdir()
    if check:
        run_any = subprocess.run(
            ["e2fsck", "-f", "-y", str(image)], capture_output=True, timeout=COMMAND_TIMEOUT_S
        )
        assert run_any.returncode in (0, 1), run_any.stdout  # clean, or repaired
    run("mount", "-o", "loop,errors=remount-ro", str(image), str(where))
    try:
        source = run("findmnt", "-n", "-o", "SOURCE", str(where)).strip()
        yield LoopDisk(image, where, Path(source).name)
    finally:
        subprocess.run(["umount", str(where)], timeout=COMMAND_TIMEOUT_S, check=True)


def tasks() -> set[int]:
    """Ids of this process's threads, those outside Python too."""
    return {int(name) for name in os.listdir("/proc/self/task")}


@contextmanager
def stopped(threads: set[int]) -> Iterator[None]:
    """Keeps threads of this process from running. None of them may hold Python's lock."""
    with suppress(AttributeError):  # systems where only a named process may trace us
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1 & 0xFFFFFFFFFFFFFFFF), 0, 0, 0)
    tracer = subprocess.Popen(
        [sys.executable, "-c", _TRACER, *map(str, sorted(threads))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert tracer.stdin is not None
    assert tracer.stdout is not None
    try:
        said = b""
        if select.select([tracer.stdout], [], [], COMMAND_TIMEOUT_S)[0]:
            said = tracer.stdout.readline()
        if said != b"stopped\n":
            tracer.kill()
            pytest.skip(f"threads cannot be stopped here: {tracer.communicate()[1].decode()}")
        yield
    finally:
        tracer.kill()
        tracer.communicate(timeout=COMMAND_TIMEOUT_S)
