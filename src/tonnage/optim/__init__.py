"""The optimizer: AdamW on split master weights, clipping by the global norm, the learning-rate schedule."""
