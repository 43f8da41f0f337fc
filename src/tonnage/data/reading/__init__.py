"""Part -> Row | RowError: bytes of every kind of file, read row by row in bounded memory."""
