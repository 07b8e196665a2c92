"""Speed as ratios within one run: machines are shared and noisy."""
