"""The commands. Each file is the flags of one, and the function over them."""
