"""Where the work of a step lies: the world of ranks, the device mesh, and the order of transformations."""
