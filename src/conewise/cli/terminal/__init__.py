"""What a command and its terminal say to each other: streams, output, errors, exit codes."""
