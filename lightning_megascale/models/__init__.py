"""Single-device models; nothing here knows of ranks."""
