"""A soak of the real processes: faults and inputs drawn by a seed, and every answer compared with the truth.

`make soak SECONDS=600 SEED=1` runs it. A run consists of episodes of about half a minute: edges with drawn sources
answer drawn queries while drawn faults happen; then all answers, in all revisions, are compared with the records that
were written. Exit status 0: no statement was false.
"""
