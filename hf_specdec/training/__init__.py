"""Training of drafters: objectives, the teacher, and learning while the target is trained."""
