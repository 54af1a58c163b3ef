"""NVIDIA GPUs: where tensors live, captured lanes, sums between devices."""
