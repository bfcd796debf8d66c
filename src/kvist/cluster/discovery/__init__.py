"""How nodes find each other: `protocol.py`, and one file a way."""
