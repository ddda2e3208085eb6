"""The LM head without stored logits, and the ops for vocabulary shards. All these ops are composed of other ops.
Imports ``_arguments``, ``_collectives``, ``_dispatch`` and ``_segments``.

``problem`` has the arguments and checks them. ``products`` cuts rows x vocabulary into tiles and computes the matrix
products. ``forward`` and ``backward`` loop over the tiles. ``op`` declares the ops.
"""
