"""How a replica is picked from those that could serve; one file a policy."""
