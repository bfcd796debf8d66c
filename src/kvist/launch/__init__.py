"""Starts nodes and engines on many hosts and keeps them alive: `kvist up` and `kvist down`."""
