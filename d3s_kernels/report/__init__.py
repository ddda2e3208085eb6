"""The page of selected tokens: its arguments, the text of each token, the HTML, and the style sheet. Imports
``_arguments``.
"""
