"""Files of runs on this machine: where they are, what they say, and times on a clock that never steps."""
