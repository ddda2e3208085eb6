"""The arguments of a selection, checked once; and the rules. What the public functions hand to the ranks."""
