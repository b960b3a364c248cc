"""Values, functions, inputs and programs as short texts that tell whether two are the same."""
