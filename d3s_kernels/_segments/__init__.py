"""Segments of a tensor: the order of the values in a segment, and how many of these values are kept. Imports
``_arguments``.
"""
