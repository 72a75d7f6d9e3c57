"""How frames travel: one file an operation."""
