"""The OpenAI-compatible front of several engines: a proxy that knows where a prompt should go.

A request's way: `server.py` (connections, TLS, the end) → `front.py` (who asks, what, how much) →
`relay.py` (choose a replica, hand on its answer, try another) → `upstream.py` (an engine's answer).
What is decided without I/O stands by itself: `ask.py`, `limits.py`, `delivered.py`, `resume.py`,
`splice.py`.
"""
