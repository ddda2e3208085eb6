"""Prints the path of the plug-in, for ms-swift's ``--external_plugins``."""

from . import PLUGIN

print(PLUGIN)
