"""Functions with autograd; the process group is an argument."""
