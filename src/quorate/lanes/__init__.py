"""The pure arithmetic of lanes: who hosts which, how tensors are cut, and in which order sums are formed."""
