"""Named axes of tensors: which parts of them are meant, and where prompts and positions lie."""
