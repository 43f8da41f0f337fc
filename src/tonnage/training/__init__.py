"""Training: the worker, its assembly, the loop, the loss, evaluation, metrics."""
