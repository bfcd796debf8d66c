"""The remote tier: blocks as framed objects in a store that many hosts share."""

from kvist.tiers.remote.frames import MissCause
from kvist.tiers.remote.learner import LearnLimits
from kvist.tiers.remote.tier import RemoteStats, RemoteTier

__all__ = ["LearnLimits", "MissCause", "RemoteStats", "RemoteTier"]
