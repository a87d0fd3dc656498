"""What modules of a model are, what of them is replaced during a call, and which state they are in."""
