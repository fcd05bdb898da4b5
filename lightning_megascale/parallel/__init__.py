"""One axis, one file, one function that applies it to a model."""
