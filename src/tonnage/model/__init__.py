"""The model: its files, its construction on the meta device, its anatomy, its weights, attention for packs."""
