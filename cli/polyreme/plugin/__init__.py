"""``kubectl polyreme``: what a user asks of jobs, queues and topology on a cluster."""
