"""Parts of nodes: the edges into readers, and the rows of positions."""
