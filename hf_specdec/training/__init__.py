"""Training drafters: objectives, teachers, and a drafter that learns while its target is trained."""
