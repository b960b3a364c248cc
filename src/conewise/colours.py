"""The colours of effects: red below zero, blue above, told apart by colour-blind readers too."""

LIGHT = "RdBu"
"""ColorBrewer's red to blue, white between, by the name that plotly has for it."""

# From the colour of a dark page outwards: 0 is dark, both ends are light. Red and blue, as on a light page.
DARK = (
    (255, 210, 194),
    (247, 155, 128),
    (214, 95, 77),
    (141, 55, 51),
    (35, 39, 46),
    (43, 84, 120),
    (63, 138, 192),
    (131, 191, 227),
    (207, 232, 247),
)

RISING = "Blues"
"""White to blue, for shares between 0 and 1."""
