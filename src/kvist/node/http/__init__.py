"""A node's blocks over HTTP: the requests of `node/cache/messages.py` with a token each."""
