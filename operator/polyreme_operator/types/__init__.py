"""What decisions read (views, snapshots) and what they answer (actions): frozen values, parsed once at the edge."""
