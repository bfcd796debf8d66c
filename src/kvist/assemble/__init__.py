"""Turns a configuration into objects; the only package that knows every implementation."""

from kvist.assemble.cluster import node_cluster
from kvist.assemble.embedded import open_embedded_store
from kvist.assemble.front import node_front
from kvist.assemble.host import node_place, node_stores, open_store
from kvist.assemble.peers import node_peering

__all__ = [
    "node_cluster",
    "node_front",
    "node_peering",
    "node_place",
    "node_stores",
    "open_embedded_store",
    "open_store",
]
