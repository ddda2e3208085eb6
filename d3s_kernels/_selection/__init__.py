"""The checks of the selections' arguments, and the selections' rules, for one process and for several ranks."""
