"""Simulator: engines of one host share memory, and a transfer is a plain copy between processes."""
