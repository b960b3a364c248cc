"""How far effects by gradients are off the exact ones, on a real model: the numbers of a page of the docs."""
