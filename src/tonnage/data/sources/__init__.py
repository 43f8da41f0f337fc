"""Source -> Part: which files a config names, of what split, and where their rows may be parted."""
