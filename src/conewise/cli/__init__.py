"""The command line: parses, calls one workload, prints. Its commands are in `commands/`.

`entry.main` is the installed command. What it needs is imported when it runs: Ctrl-C ends it quietly from the
first moment on, and `conewise --help` does not wait for torch.
"""

# Exit codes.
FINE, CHECK_FAILED, USAGE, INTERNAL, UNWRITTEN, INTERRUPTED, UNREAD = 0, 1, 2, 70, 74, 130, 141
