"""What removing means, what it becomes, and the only code that cuts."""
