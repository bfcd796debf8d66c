"""Doing less work with the KV cache that is there."""
