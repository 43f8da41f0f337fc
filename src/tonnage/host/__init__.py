"""What a machine is and lends: processors, control groups, memory, caches, and the machines of a run side by side.

Only ``locked`` imports torch.
"""
