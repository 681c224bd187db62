"""How far scoring methods depend on tiny changes of the weights."""
