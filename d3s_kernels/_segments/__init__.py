"""Segments of a tensor, the order of the values in a segment, and how many values of a segment are kept. Used by
several packages.
"""
