"""Helpers under the paths that programs import them from."""
