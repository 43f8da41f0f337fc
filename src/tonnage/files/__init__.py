"""Small files and what people typed: read within bounds, written whole or not at all, and made safe to show."""
