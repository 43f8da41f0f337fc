"""Where bytes rest when they are not on the compute device, and how they move. Knows nothing of what they mean."""
