"""Segments of a tensor, the order of their values, and how many of each are kept. Several packages use them."""
