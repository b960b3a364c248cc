"""Edges: the parts that components wrote into the stream, and what readers make of a changed one."""
