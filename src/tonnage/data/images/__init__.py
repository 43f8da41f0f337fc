"""Images of rows: opened and checked, made into tokens by the model's own processor, and kept with the documents."""
