"""`python -m conewise.interfaces.cli`: the same as the installed command."""

from conewise.interfaces.cli import app

app(prog_name="conewise")
