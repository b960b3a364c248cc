"""The exit codes of the command, as `conewise --help` lists them."""

FINE, CHECK_FAILED, USAGE, INTERNAL, UNWRITTEN, INTERRUPTED, UNREAD = 0, 1, 2, 70, 74, 130, 141
