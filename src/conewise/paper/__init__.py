"""The paper: its theory in closed form, its experiments on real graphs, and the numpy operations they use."""
