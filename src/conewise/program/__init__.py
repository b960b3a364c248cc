"""A captured module as a program: records, rules, sizes, weights."""
