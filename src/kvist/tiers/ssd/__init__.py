"""The SSD tier: a crash-safe log of segment files under a hard byte cap."""

from kvist.tiers.ssd.engine import EngineKind
from kvist.tiers.ssd.io import FsyncMode, IoMode, PosixIo, SegmentIo
from kvist.tiers.ssd.reads import MissCause
from kvist.tiers.ssd.recovery import (
    KeyspaceUse,
    SegmentReport,
    SegmentState,
    VerifyReport,
    scan_directory,
)
from kvist.tiers.ssd.tier import SsdStats, SsdTier

__all__ = [
    "EngineKind",
    "FsyncMode",
    "IoMode",
    "KeyspaceUse",
    "MissCause",
    "PosixIo",
    "SegmentIo",
    "SegmentReport",
    "SegmentState",
    "SsdStats",
    "SsdTier",
    "VerifyReport",
    "scan_directory",
]
