"""Where the weight of a network lies by depth, and what its sweeps gain by that."""
