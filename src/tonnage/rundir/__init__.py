"""The run directory: its files, what stands in them, and who holds a run up."""
