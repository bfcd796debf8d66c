"""Kvist inside an engine: thin shims over one engine-neutral plan."""
