"""The table of all ops: how to draw an op's arguments, what the op means, and the error that a back-end may have."""
