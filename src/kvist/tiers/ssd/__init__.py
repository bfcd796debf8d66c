"""The SSD tier: a crash-safe log of segment files under a hard byte cap."""

from kvist.tiers.ssd.io import FsyncMode, PosixIo, SegmentIo
from kvist.tiers.ssd.recovery import (
    KeyspaceUse,
    SegmentReport,
    SegmentState,
    VerifyReport,
    scan_directory,
)
from kvist.tiers.ssd.tier import MissCause, SsdStats, SsdTier

__all__ = [
    "FsyncMode",
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
