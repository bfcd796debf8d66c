"""What the gateway adds: to the first token, in memory, and to others when one client is slow."""
