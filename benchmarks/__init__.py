"""How fast it is: ratios measured side by side in one run, interleaved, with the answers checked."""
