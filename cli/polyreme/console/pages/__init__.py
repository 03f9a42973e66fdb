"""Pages of the console: each module declares its ``ROUTES``, and no other module names it."""
