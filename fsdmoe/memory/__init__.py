"""What a step keeps from forward to backward, and ways to keep less of it."""
