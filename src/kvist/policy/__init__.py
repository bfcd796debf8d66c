"""What stays and what enters: eviction orders and insert filters. No bytes, no locks."""

from kvist.policy.arc import Arc
from kvist.policy.belady import Belady
from kvist.policy.fifo import Fifo
from kvist.policy.filters import AdmitAll, ByValue, InsertFilter, SecondSight
from kvist.policy.gdsf import Gdsf
from kvist.policy.leaf_lru import LeafLru
from kvist.policy.lirs import Lirs
from kvist.policy.lru import Lru
from kvist.policy.protocol import EvictionPolicy
from kvist.policy.s3_fifo import S3Fifo
from kvist.policy.sieve import Sieve
from kvist.policy.value import Value
from kvist.policy.w_tinylfu import WTinyLfu

__all__ = [
    "AdmitAll",
    "Arc",
    "Belady",
    "ByValue",
    "EvictionPolicy",
    "Fifo",
    "Gdsf",
    "InsertFilter",
    "LeafLru",
    "Lirs",
    "Lru",
    "S3Fifo",
    "SecondSight",
    "Sieve",
    "Value",
    "WTinyLfu",
]
