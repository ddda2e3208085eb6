"""The support of a distribution: the ids that a sampler left of the vocabulary, given, computed or recorded. Imports
``_arguments`` and ``_dispatch``.
"""
