"""What each kind means: the registry, a handler's context, and the built-in handlers."""
