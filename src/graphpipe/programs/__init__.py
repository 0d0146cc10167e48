"""Whole programs made of the library: what the commands run."""
