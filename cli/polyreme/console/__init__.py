"""A console in the browser: runs, comparison, submission, this machine and its data, served on loopback."""
