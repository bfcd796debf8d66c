"""Who holds which block, and who should: decisions of a cluster without a master. No I/O."""
