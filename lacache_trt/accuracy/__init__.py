"""What a lower precision costs: exact match, divergence of predictions, noise per layer, ulps."""
