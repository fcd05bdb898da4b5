"""The command line: one file, one verb."""
