"""A table of all ops, for all checks: how an op's arguments are drawn, what it means, how far a result may be off."""
