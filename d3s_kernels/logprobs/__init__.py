"""Log-probabilities of tokens, from logits or straight from the LM head. Imports ``_arguments``, ``_dispatch``,
``_lm_head`` and ``support``.
"""
