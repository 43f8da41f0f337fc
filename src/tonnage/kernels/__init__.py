"""Fast operations for a device, each beside its plain twin in torch; and which of them is used."""
