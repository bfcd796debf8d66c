"""The only time models of the system: prefill, decode, transfer, and load or recompute."""
