"""Layers: each wraps any storage adapter and is one itself."""

from kvist.adapters.layers.breaker import BreakerLayer
from kvist.adapters.layers.chaos import Blow, ChaosLayer
from kvist.adapters.layers.count import CountLayer, OperationCounts
from kvist.adapters.layers.layer import Layer, Operation
from kvist.adapters.layers.retry import RetryLayer
from kvist.adapters.layers.throttle import ThrottleLayer
from kvist.adapters.layers.timeout import TimeoutLayer

__all__ = [
    "Blow",
    "BreakerLayer",
    "ChaosLayer",
    "CountLayer",
    "Layer",
    "Operation",
    "OperationCounts",
    "RetryLayer",
    "ThrottleLayer",
    "TimeoutLayer",
]
