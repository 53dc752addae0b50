"""The page of look.py: reads run folders while they grow, and serves them to a browser."""
