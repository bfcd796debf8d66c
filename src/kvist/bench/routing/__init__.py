"""Routing with real engines: the same requests to the same replicas, one policy after another."""
