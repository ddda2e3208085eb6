"""Makes a page of selected tokens: the text of each token, the HTML, and the style."""
