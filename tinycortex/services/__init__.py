"""The queue's use cases. Each owns one transaction; what they decide with is in the domain."""
