"""The page of look.py: run folders read while they grow, and served to a browser."""
