"""A model, its cache and its parts under the names of TransformerLens."""
