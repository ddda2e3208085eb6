"""The checked arguments of the selections, and their rules, for one process and for several ranks."""
