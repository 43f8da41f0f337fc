"""What other programs read: their templates, their files, and the commands that serve a model with them."""
