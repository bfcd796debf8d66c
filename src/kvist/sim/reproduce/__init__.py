"""Mooncake's published experiments (FAST'25), run again in the simulator on its public traces."""
