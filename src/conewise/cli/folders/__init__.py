"""The folders that commands write and read."""
