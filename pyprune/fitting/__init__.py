"""From a budget to a checkpoint: score, solve, try the best solutions for real, recover the winner."""
