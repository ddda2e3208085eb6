"""The LM head without its logits, and the ops for a vocabulary that ranks share: ops that are made of other ops.

``problem`` has the arguments and checks them. ``products`` cuts rows x vocabulary into tiles and multiplies.
``forward`` and ``backward`` loop over the tiles. ``op`` declares the ops.
"""
