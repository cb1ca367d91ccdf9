"""What is to be reached, in one table: the medians of interleaved rounds with default settings.

A figure of another engine gets its target here and is yielded by the benchmark that measures it.
"""

from benchmarks.figures import Target

CLAIM_BY_BACKLOG = Target.at_most(2, goal=1.4)
"""A claim at the largest backlog ÷ at the smallest."""

ENQUEUE_TIME = Target.at_most(2, goal=1.5)
"""One enqueue ÷ one of the bare driver, at the same ``synchronous``."""

BULK = Target.at_least(20_000, goal=40_000)
"""Rows/s of ``enqueue_many``."""

ONE_AT_A_TIME = Target.at_least(0.45, goal=0.7)
"""Jobs/s with ``concurrency=1`` ÷ the bare driver's claim and settlement."""

DEFAULT_WORKER = Target.at_least(2, goal=4)
"""Jobs/s of the default worker ÷ the bare driver's claim and settlement."""

FOLLOW_UPS = Target.at_least(1, goal=2)
"""The same, when every job leaves one more behind."""

FOUR_PROCESSES = Target.at_least(0.9, goal=1)
"""Jobs/s of four workers on one file ÷ of one."""

SHARE_OF_WORK = Target.at_least(0.5, goal=0.8)
"""The jobs of the slowest of several workers ÷ of the fastest."""

CLAIM_WAIT_MS = Target.at_most(250, goal=250)
"""The 99th percentile of what one claim takes beside other workers (ms)."""

HUEY = Target.at_least(3, goal=6)
"""Jobs/s of the default worker ÷ of huey's."""

PGQUEUER = Target.at_least(2, goal=4)
"""On PostgreSQL, jobs/s of four default workers ÷ of four of pgqueuer's with batches of 10."""

SAME_PROCESS_MS = Target.at_most(5, goal=1)
"""From an enqueue to its handler's start, on an idle worker of the same process (ms)."""

OTHER_PROCESS_MS = Target.at_most(60, goal=20)
"""The same, on an idle worker of another process (ms)."""

ON_A_SERVER_MS = Target.at_most(8, goal=4)
"""From an enqueue of the same or of another process to its handler's start, where commits are announced (ms)."""

MEMORY = Target.at_most(1.1, goal=1)
"""A worker's resident memory after many jobs ÷ after few."""

STARTUP_S = Target.at_most(0.5, goal=0.25)
"""Import and opening of an existing file (s)."""
