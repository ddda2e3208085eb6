"""Segments of a tensor, the order of their values, and how many of each are kept: what several rooms need."""
