"""Compiled kernels: they know addresses and sizes, and import nothing of ours."""
