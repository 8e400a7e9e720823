"""Number formats of weights, gradients and matrix products."""
