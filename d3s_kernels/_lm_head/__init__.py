"""The LM head, which stores no logits unless it is told to, and the ops for vocabulary shards. All these ops are
composed of other ops. Imports ``_arguments``, ``_collectives``, ``_dispatch`` and ``_segments``.

``problem`` has the arguments and checks them. ``tiles`` cuts rows x vocabulary into tiles. ``products`` computes the
matrix products. ``forward`` and ``backward`` loop over the tiles. ``op`` declares the ops.
"""
