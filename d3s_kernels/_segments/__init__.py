"""Segments of a tensor, the order of their values, and how many values of each are kept. For several packages."""
