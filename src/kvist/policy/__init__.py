"""What stays: eviction orders. Order only; no bytes, no locks, no clock."""

from kvist.policy.leaf_lru import LeafLru
from kvist.policy.lru import Lru
from kvist.policy.protocol import EvictionPolicy

__all__ = ["EvictionPolicy", "LeafLru", "Lru"]
