"""``python -m benchmarks``."""

from benchmarks.cli import app

if __name__ == "__main__":  # a child process imports this module, too
    app()
