"""From a budget to a checkpoint: score, solve, try the best solutions for real, write and recover the winner."""
