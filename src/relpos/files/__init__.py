"""Files: read with suspicion (`reading`), written whole or not at all (`writing`)."""
