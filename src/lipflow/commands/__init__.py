"""The commands that work on a finished run. Each file is the flags of one, and the function over them."""
