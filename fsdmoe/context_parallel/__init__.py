"""Context parallelism: sequences split over ranks, exact attention across the pieces, and how to split."""
