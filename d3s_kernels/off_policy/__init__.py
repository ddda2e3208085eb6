"""How far the policy has moved since the tokens were drawn: importance ratios, and which tokens can be trusted. Imports
``_arguments``, ``_collectives``, ``_dispatch``, ``_rules``, ``_segments`` and ``distributed``.
"""
