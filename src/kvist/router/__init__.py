"""Which replica serves a request: what each of them already has, and what that is worth."""
