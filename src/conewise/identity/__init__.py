"""Values, functions, inputs and programs as short texts."""
