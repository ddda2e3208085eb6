"""D3S in ms-swift's GRPO: a plug-in file for ms-swift's ``--external_plugins``.

``python -m d3s_kernels.integrations.swift`` prints the file's path. Importing this package does not import ms-swift.
"""

from pathlib import Path

# The plug-in's folder contains nothing else, since ms-swift puts this folder at the front of sys.path.
PLUGIN = str(Path(__file__).resolve().parent / "plugin" / "d3s_plugin.py")
"""The path of the plug-in."""
