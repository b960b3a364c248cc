"""The command line: parses, calls one workload, prints. One module for each command or small group of them.

`entry.main` is the installed command. What it needs is imported when it runs: Ctrl-C ends it quietly from the
first moment on, and `conewise --help` does not wait for torch.
"""
