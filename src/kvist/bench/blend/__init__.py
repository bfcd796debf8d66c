"""Measures blend: finding cached text, and what reusing it costs and gives."""
