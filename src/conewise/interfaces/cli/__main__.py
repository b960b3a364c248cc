"""`python -m conewise.interfaces.cli`: the same as the installed command."""

from conewise.interfaces.cli import main

main()
