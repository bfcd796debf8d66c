"""Kvist: keeps the KV cache that LLM engines throw away."""

__version__ = "0.1.0"
