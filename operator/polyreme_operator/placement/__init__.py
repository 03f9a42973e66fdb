"""Which node for which worker of a gang: the nearest nodes that hold it, ranks ordered by what they send each other."""
