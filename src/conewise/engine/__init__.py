"""When it is computed: worlds, demands, the ledger."""
