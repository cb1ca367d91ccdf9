"""The ``tinycortex`` command: each command is thin, and ends in one clear line and the right exit code.

0: done. 1: failed, with one line on standard error. 2: wrong usage. 130: interrupted; ``work`` and
``scheduler`` stop with 0 at the first SIGINT or SIGTERM, and end with 128 + its number at a second one.
"""

import logging
import os
import sys

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from tinycortex.cli.output import print_error
from tinycortex.cli.root import app
from tinycortex.domain.failures import describe_error
from tinycortex.errors import TinycortexError

logger = logging.getLogger(__name__)

OK, FAILED, INTERRUPTED = 0, 1, 130  # and 2, wrong usage, is Typer's own


def main() -> None:
    """Run the command line and exit."""
    sys.exit(_run())


def _run() -> int:
    try:
        app(standalone_mode=True)
    except SystemExit as end:
        return _flush(end.code if isinstance(end.code, int) else FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        return _abandon_output()
    except TinycortexError as error:
        print_error(str(error))
    except DBAPIError as error:
        print_error(f"the database refused: {error.orig}")  # never the statement or its values
    except SQLAlchemyError as error:
        print_error(f"the database cannot be used: {type(error).__name__}")
    except OSError as error:
        print_error(f"{error.filename or 'the system'}: {error.strerror or error}")
    except Exception as error:
        # Not a line that helps everybody, but the one that a supervisor's log has room for.
        print_error(f"unexpected: {describe_error(error)}; --verbose shows where it came from")
        logger.debug("the command met an unexpected error", exc_info=True)
    return FAILED


def _flush(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _abandon_output()
    return code


def _abandon_output() -> int:
    # Python flushes standard output once more at its exit; it must find somewhere to write.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OK
