"""How a page of selected tokens is made: the text of each token, the HTML, and its style."""
