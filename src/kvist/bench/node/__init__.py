"""Measures what a node costs an engine: moving blocks beside memcpy, and control operations."""
