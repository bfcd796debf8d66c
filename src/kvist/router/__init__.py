"""Which replica serves a request, and whether at all: decisions without I/O."""
