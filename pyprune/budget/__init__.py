"""From what a device allows to a plan: budgets, what layers cost on a machine, what their removal loses, the search."""
