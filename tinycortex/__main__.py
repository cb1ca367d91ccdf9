"""``python -m tinycortex`` is the ``tinycortex`` command."""

from tinycortex.cli import main

if __name__ == "__main__":
    main()
