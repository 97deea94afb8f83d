"""Files: read as untrusted input (`reading`), written completely or not at all (`writing`)."""
