"""Pure rules and values: no I/O, no SQLAlchemy, no clock but the one that is handed in."""
