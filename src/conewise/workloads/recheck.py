"""Cells of a result against plain full forwards of the original module, with hooks: no graph, no engine."""
