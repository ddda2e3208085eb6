"""Segments of a tensor: the order of their values, and how many values are kept. Several packages use them."""
