"""The only code that touches rows. Repositories hand out values, and never commit."""
