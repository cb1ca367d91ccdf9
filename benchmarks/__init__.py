"""How fast the queue is, measured against the bare driver, its peers and its own targets; see README.md here."""
