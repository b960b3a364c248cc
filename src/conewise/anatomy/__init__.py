"""The parts of a program: attention, the residual stream, components, axes; and names for them."""
