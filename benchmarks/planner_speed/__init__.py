"""How long a search takes."""
