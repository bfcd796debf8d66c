"""Nodes that read each other's blocks over TCP."""
