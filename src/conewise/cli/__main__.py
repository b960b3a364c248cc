"""`python -m conewise.cli`: the same as the installed command."""

from conewise.cli.entry import main

main()
