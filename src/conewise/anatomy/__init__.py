"""What a program contains: attention, the residual stream, components, axes; and names for them."""
