"""The dry run: a plan's real code on ranks that do not exist, for its bytes, operations, traffic and memory."""
