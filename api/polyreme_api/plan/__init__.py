"""The plan of a run as arithmetic: model shapes, which layouts fit, communication volumes, the plan and its hash."""
