"""The commands of the command line, one per module, and what they share: `parts` and `terminal`."""
