"""Components, the writers and readers of the residual stream, and the graph of their names."""
