"""The plug-in for ``--external_plugins``. ms-swift's GRPO then trains on the rollouts and tokens that D3S chooses."""

from d3s_kernels.integrations.swift.register import register

register()
