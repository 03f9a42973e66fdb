"""Placement of gangs: the nearest nodes that hold a gang, and an order of ranks that keeps traffic short."""
