"""Whether a KV cache would pay on a deployment's traffic, and what to buy: `kvist advise`."""
