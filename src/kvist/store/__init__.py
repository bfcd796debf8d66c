"""BlockStore: match, read and write blocks; promotion, demotion and recovery between tiers."""

from kvist.store.breaker import Breaker, BreakerState
from kvist.store.null import NullStore
from kvist.store.quota import Quota
from kvist.store.stats import BlockInfo, StoreStats
from kvist.store.tiered import TieredStore

__all__ = [
    "BlockInfo",
    "Breaker",
    "BreakerState",
    "NullStore",
    "Quota",
    "StoreStats",
    "TieredStore",
]
