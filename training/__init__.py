"""How the models that come with conewise were trained; no part of the installed package."""
