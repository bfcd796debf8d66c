"""The production code of `kvist.cluster` in a cluster of faults, on a virtual clock."""
