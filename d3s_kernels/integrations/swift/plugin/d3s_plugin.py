"""For ms-swift's ``--external_plugins``: its GRPO trains on the rollouts and the tokens that D3S chooses."""

from d3s_kernels.integrations.swift.register import register

register()
