"""What other machines are asked, and the secrets that this takes."""
