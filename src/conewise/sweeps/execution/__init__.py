"""Plans of sweeps, run over tensors."""
