"""What training a drafter needs besides its forward pass."""
