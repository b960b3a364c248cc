"""`python -m conewise.cli`: the same as the installed command."""

from conewise.cli import main

main()
