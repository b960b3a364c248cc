"""The paper's own experiments and theorems, beside its printed figures."""
