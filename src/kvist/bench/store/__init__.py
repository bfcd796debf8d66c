"""The store benchmark: Kvist's tiers beside the hardware's limits and beside other stores."""
