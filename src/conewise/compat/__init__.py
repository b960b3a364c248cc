"""Other libraries' ways of asking, answered by sweeps: a notebook changes an import."""
