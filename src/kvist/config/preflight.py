"""What a configuration means on this machine: `auto` sizes, and what would go wrong at start."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvist.adapters.opening import Limits, check_url, open_layered
from kvist.codec.setting import REMOTE, SSD, CodecSetting
from kvist.config.cluster_schema import check_cluster
from kvist.config.peers_schema import check_peers, check_transport
from kvist.config.schema import Config
from kvist.config.size import format_size
from kvist.config.store_schema import GIB, MIB
from kvist.core.errors import ConfigError, TierError

MIN_DRAM_BYTES = 16 * MIB
MIN_SSD_BYTES = 64 * MIB
MAX_AUTO_DRAM_BYTES = 8 * GIB
MAX_AUTO_SSD_BYTES = 64 * GIB
_PROBE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory of the machine, or of the container when it has less."""

    physical_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that would go wrong, with the knob and what to do about it."""

    path: str
    message: str
    remedy: str
    origin: str = "default"

    def __str__(self) -> str:
        return f"$.{self.path} ({self.origin}): {self.message}; {self.remedy}"


def read_machine(root: Path = Path("/")) -> Machine:
    """Memory from /proc/meminfo, limited by the cgroup (v2) of a container."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = physical
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            physical = int(rest.split()[0]) * 1024
        elif name == "MemAvailable":
            available = int(rest.split()[0]) * 1024
    limit = _text(root / "sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        used = _text(root / "sys/fs/cgroup/memory.current").strip()
        physical = min(physical, int(limit))
        available = min(available, int(limit) - int(used or 0))
    return Machine(physical, max(0, min(available, physical)))


def dram_bytes(config: Config, machine: Machine | None = None) -> int:
    """Capacity of the DRAM tier in bytes, `auto` resolved (a whole number of MiB)."""
    capacity = config.store.dram.capacity
    if capacity != "auto":
        return capacity
    available = (machine or read_machine()).available_bytes
    return min(available // 4, MAX_AUTO_DRAM_BYTES) // MIB * MIB


def ssd_folders(config: Config) -> tuple[Path, ...]:
    """The folders of the SSD tier, `~` expanded, absolute."""
    path = config.store.ssd.path
    return tuple(
        Path(p).expanduser().absolute() for p in ((path,) if isinstance(path, str) else path)
    )


def ssd_folder(config: Config) -> Path:
    """The first, and mostly the only, folder of the SSD tier."""
    return ssd_folders(config)[0]


def ssd_codec(config: Config) -> CodecSetting:
    """How the SSD tier encodes blocks."""
    ssd = config.store.ssd
    return CodecSetting(SSD, ssd.codec, ssd.keys, ssd.table)


def remote_codec(config: Config) -> CodecSetting:
    """How the remote tier encodes blocks; a model has one table."""
    remote = config.store.remote
    return CodecSetting(REMOTE, remote.codec, remote.keys, config.store.ssd.table)


def ssd_bytes(config: Config, free_bytes: int | None = None, *, folder: Path | None = None) -> int:
    """Capacity of one folder of the SSD tier in bytes, `auto` resolved (a whole number of MiB).

    The first folder is meant by default.
    What the folder already holds counts as free: else the cap would shrink at every start.
    """
    capacity = config.store.ssd.capacity
    if capacity != "auto":
        return capacity
    folder = folder or ssd_folder(config)
    if free_bytes is None:
        free_bytes = shutil.disk_usage(_nearest(folder)).free + _held_bytes(folder)
    return min(free_bytes // 10, MAX_AUTO_SSD_BYTES) // MIB * MIB


def preflight(
    config: Config,
    *,
    origins: Mapping[str, str] | None = None,
    machine: Machine | None = None,
) -> list[Problem]:
    """What would go wrong at start. Makes the SSD folder and writes a probe file in it."""
    origins = origins or {}
    found = [*_dram_problems(config, machine or read_machine())]
    if config.store.ssd.enabled:
        for folder in ssd_folders(config):
            found += _folder_problems(folder) or _ssd_problems(config, folder)
        found += _codec_problems(ssd_codec(config))
    found += _remote_problems(config) + _peers_problems(config)
    return [Problem(p.path, p.message, p.remedy, origins.get(p.path, "default")) for p in found]


def remote_answers(config: Config) -> Problem | None:
    """What is wrong with the remote, if it does not answer now. An engine starts without it, too.

    Raises:
        ConfigError: the URL is no remote; `preflight` has reported it.
    """
    knobs = config.store.remote
    limits = Limits(connections=1, timeout_s=knobs.timeout_s, retries=0)
    opened = open_layered(knobs.url, limits)
    try:
        opened.adapter.list_page("", limit=1)
    except TierError as error:
        text = f"does not answer: {error.strerror or error}"
        return Problem("store.remote.url", text, "engines run without it until it does")
    finally:
        opened.adapter.close()
    return None


def _remote_problems(config: Config) -> list[Problem]:
    if not config.store.remote.url:
        return []
    try:
        check_url(config.store.remote.url)
    except ConfigError as error:
        return [Problem("store.remote.url", error.message, error.remedy)]
    return _codec_problems(remote_codec(config))


def _peers_problems(config: Config) -> list[Problem]:
    try:
        check_peers(config.node.peers)
        check_transport(config.node.peers)
        check_cluster(config.node.cluster, config.node.peers)
    except ConfigError as error:
        return [Problem(error.path.removeprefix("$."), error.message, error.remedy)]
    return []


def _dram_problems(config: Config, machine: Machine) -> list[Problem]:
    size_bytes, path = dram_bytes(config, machine), "store.dram.capacity"
    if size_bytes < MIN_DRAM_BYTES:
        return [
            Problem(
                path,
                f"{format_size(size_bytes)} is below {format_size(MIN_DRAM_BYTES)}",
                "give it more, or free some memory",
            )
        ]
    if size_bytes > machine.physical_bytes:
        have = format_size(machine.physical_bytes // MIB * MIB)
        return [
            Problem(
                path,
                f"{format_size(size_bytes)} is above the {have} of memory that there is",
                'lower it, or use "auto"',
            )
        ]
    return []


def _ssd_problems(config: Config, folder: Path) -> list[Problem]:
    size_bytes, path = ssd_bytes(config, folder=folder), "store.ssd.capacity"
    if size_bytes < MIN_SSD_BYTES:
        return [
            Problem(
                path,
                f"{format_size(size_bytes)} is below {format_size(MIN_SSD_BYTES)}",
                "give it more, or set store.ssd.enabled=false",
            )
        ]
    usage = shutil.disk_usage(folder)
    if size_bytes > usage.total:
        have = format_size(usage.total // MIB * MIB)
        return [
            Problem(
                path,
                f"{format_size(size_bytes)} is above the {have} of the file system",
                'lower it, or use "auto"',
            )
        ]
    return []


def _codec_problems(setting: CodecSetting) -> list[Problem]:
    """What is wrong with codec and keys as far as can be told without a model."""
    try:
        setting.check()
    except ConfigError as error:
        return [Problem(error.path.removeprefix("$."), error.message, error.remedy)]
    return []


def _folder_problems(folder: Path) -> list[Problem]:
    probe = folder / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
    data = secrets.token_bytes(_PROBE_BYTES)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with probe.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            intact = probe.read_bytes() == data
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        return [
            Problem(
                "store.ssd.path",
                f"cannot use {folder}: {error.strerror or error}",
                "choose a folder that this user can write, or set store.ssd.enabled=false",
            )
        ]
    if not intact:
        return [
            Problem(
                "store.ssd.path",
                f"{folder} gave back other bytes than were written",
                "choose another disk",
            )
        ]
    return []


def _nearest(folder: Path) -> Path:
    """The closest ancestor that exists: the folder itself is made later."""
    return next((p for p in (folder, *folder.parents) if p.is_dir()), Path("/"))


def _held_bytes(folder: Path) -> int:
    """Bytes of the segments in the folder and its shards."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*.kvs"))
    except OSError:
        return 0  # a folder that preflight will report, or one being cleared


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not Linux, or no cgroup: the caller has a fallback
