"""The server's side of weight pushes, and what may reach it."""
