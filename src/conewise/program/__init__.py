"""What a captured module computes: records, rules, sizes, weights."""
