"""Input of decisions (views, snapshots) and their output (actions): frozen values, parsed once at the edge."""
