"""Document -> Pack: which documents go through the model together, and in which order."""
