"""The command line: parses, calls one workload, prints.

`entry.main` is the installed command. What it needs is imported when it runs: Ctrl-C ends it quietly from the
first moment on, and `conewise --help` does not wait for torch.
"""

# Exit codes, by the names of sysexits.h and of signals: 128 and the signal's number.
OK, FAILURE, USAGE, SOFTWARE, IOERR, SIGINT, SIGPIPE = 0, 1, 2, 70, 74, 130, 141
