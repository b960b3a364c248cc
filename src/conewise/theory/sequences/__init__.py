"""Changes that stay, one after another: what each costs after those before it."""
