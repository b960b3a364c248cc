"""The paper's claims, each run on real graphs."""
