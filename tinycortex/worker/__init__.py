"""The worker: one step (claim, perform, settle), and the loops that drive it."""
