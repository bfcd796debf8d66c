"""Measures how fast one node reads another's blocks over TCP, beside a plain socket and peers."""
